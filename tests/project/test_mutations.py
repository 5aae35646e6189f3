"""The list of wrong changes in `tests/mutations`: each still fits the code, and names tests that there are.

What the tests say to them is seen by running `tests/mutations/run.py`.
"""

import pathlib
import runpy

import pytest


FOLDER = pathlib.Path(__file__).parents[1] / "mutations"


@pytest.fixture
def script(monkeypatch):
    """The script's names."""
    monkeypatch.syspath_prepend(FOLDER)  # as when it is run
    return runpy.run_path(str(FOLDER / "run.py"))


@pytest.fixture
def change(script):
    """A function that makes a change of a file `a.py`."""
    return lambda old: script["Change"]("what is wrong", "a.py", old, "new", ())


def package(folder, **files):
    (folder / "haliax_fp8").mkdir()
    for name, text in files.items():
        (folder / "haliax_fp8" / f"{name}.py").write_text(text)
    return folder


def test_every_change_fits_the_code(script):
    """One that does not: write the same mistake for the code as it is now, or remove it if it cannot be made."""
    assert [result.detail for result in script["checked"](script["CHANGES"])] == []


def test_every_change_is_described_once_and_changes_something(script):
    changes = script["CHANGES"]
    assert len({change.what for change in changes}) == len(changes)
    assert all(change.old.split() != change.new.split() for change in changes)


def test_the_tests_that_should_notice_exist(script):
    named = {test for change in script["CHANGES"] for test in change.tests}
    root = FOLDER.parents[1]
    files = {
        name: (root / script["file_of_test"](name, root)).read_text() for name in {t.partition("::")[0] for t in named}
    }
    missing = [t for t in named if "::" in t and f"def {t.partition('::')[2]}(" not in files[t.partition("::")[0]]]
    assert not missing


def test_code_is_found_however_it_is_laid_out_and_wherever_it_was_moved(script, change, tmp_path):
    root = package(tmp_path, a="x = 1\n", b="y = f(\n    1,\n    2,\n)\nz = 3\n")
    path, text = script["changed"](change("f( 1, 2, )"), root)
    assert path.name == "b.py" and text == "y = new\nz = 3\n"


def test_its_own_file_comes_first(script, change, tmp_path):
    root = package(tmp_path, a="x = 1\n", b="x = 1\n")
    assert script["position_of"](change("x = 1"), root)[0].name == "a.py"


@pytest.mark.parametrize(
    "text, message",
    [("x = 1\n", "'y = 2' is not in a.py, nor anywhere else"), ("y = 2\n\ny = 2\n", "a.py:1, .*a.py:3")],
)
def test_what_does_not_fit_is_named(script, change, tmp_path, text, message):
    with pytest.raises(script["Stale"], match=message):
        script["position_of"](change("y = 2"), package(tmp_path, a=text))


@pytest.mark.parametrize(
    "code, output, outcome, detail",
    [
        (0, "3 passed", "SURVIVED", "test_a.py"),
        (1, "F\nFAILED tests/test_a.py::test_b - assert 1 == 2\n", "NOTICED", "test_a.py::test_b"),
        (None, "more than 5 s", "LATE", "more than 5 s"),
        (4, "x\nERROR: not found: test_c", "BROKEN", "ERROR: not found: test_c"),
    ],
)
def test_what_a_run_says(script, code, output, outcome, detail):
    change = script["Change"]("what is wrong", "a.py", "old", "new", ("test_a.py",))
    assert script["judged"](change, code, output) == (script["Outcome"][outcome], detail)
