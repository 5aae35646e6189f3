"""Phase: in which recipe a training step multiplies from one of its steps on."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import optax

from .._arguments import require_integer
from .._op import Fp8DotGeneral
from ..devices.device import Device
from ..layers.rule import LayerRule
from ..layers.walk import Pattern, all_ops, as_patterns, is_op, map_layers_and_ops, matches, unmatched_error
from ..recipes.catalog import RecipeLike, as_recipe
from ..recipes.recipe import Recipe
from ..recipes.scaling import HighPrecision
from ..recipes.support import Outcome, require_support, supported
from .monitor import CountedState


def as_converted(recipe: Recipe) -> Recipe:
    """The recipe that a layer was converted with: what a phase uses by default."""
    return recipe


type RecipeOfPhase = RecipeLike | Callable[[Recipe], Recipe] | None


@dataclasses.dataclass(frozen=True)
class Phase:
    """What the converted layers of a model multiply in, from a step on; for `TrainStep(phases=...)`.

    The model, its state and the optimizer's stay as they are: `start` alone selects a program. All phases record the
    amaxes that the recipe of the conversion needs, so that none begins with scales of 1. A layer therefore has one
    state for the whole run. A phase may use a recipe without state in any layer, and one with state if that is the
    state that the layer has.

    Args:
        start: The first step of the phase, counted from 0.
        recipe: A recipe, its name, or a scaling to use for all operands; None for high precision; or a function that
            makes the recipe out of each layer's, such as `Recipe.backward_only`. By default the layer's.
        overrides: The same for the layers that a pattern selects, as in `Fp8Config`. The first pattern that matches
            wins.

    Raises:
        ValueError: If `start` is not an integer of at least 0, or something is not a recipe or a pattern.

    Example:
        High precision at first; then as converted; and the forward pass in high precision at the end:

        >>> phases = [Phase(0, None), Phase(2), Phase(4, Recipe.backward_only)]
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3), phases=phases)
        >>> fp8_model = fp8_linear_layers(model, recipe="rowwise")
        >>> describe(fp8_model, step=step).phases[1]
        'From step 2: FP8: 2 of 2 linear layers, RowwiseScaling E4M3/E4M3/E4M3, emulated on cpu'
        >>> opt_state = step.init(fp8_model)
        >>> for _ in range(3):
        ...     print(step.phase(opt_state))
        ...     fp8_model, opt_state, metrics = step(fp8_model, opt_state, x)
        high precision from step 0
        high precision from step 0
        as converted from step 2
    """

    start: int
    recipe: RecipeOfPhase = as_converted
    overrides: Mapping[Pattern, RecipeOfPhase] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_integer("start", self.start, of="Phase")
        if self.start < 0:
            raise ValueError(f"start={self.start} of Phase must be at least 0, the first step of a run")
        as_patterns("overrides", tuple(self.overrides))
        for name, choice in self._choices:
            if choice is not None and not _is_function(choice):
                as_recipe(choice, name)

    def __hash__(self) -> int:
        return hash((self.start, self.recipe, tuple(self.overrides.items())))

    def __str__(self) -> str:
        """What a progress line shows."""
        return self._text(str)

    @property
    def recorded(self) -> str:
        """What a checkpoint records, with all options of recipes."""
        return self._text(repr)

    def _text(self, of_recipe: Callable[[Any], str]) -> str:
        others = (f", {_name(pattern)} {_text(choice, of_recipe)}" for pattern, choice in self.overrides.items())
        return f"{_text(self.recipe, of_recipe)}{''.join(others)} from step {self.start}"

    @property
    def _choices(self) -> list[tuple[str, RecipeOfPhase]]:
        """The recipe and those of overrides, by the names of the arguments."""
        of_overrides = [(f"overrides[{pattern!r}]", choice) for pattern, choice in self.overrides.items()]
        return [("recipe", self.recipe), *of_overrides]

    def applied[M](self, model: M, rules: tuple[LayerRule, ...]) -> M:
        """The model as this phase differentiates it: with ops of its recipes, which keep the state of the model's.

        Args:
            model: A converted model.
            rules: The rules of its layers' classes.

        Raises:
            ValueError: If a pattern selects no converted layer, or a recipe keeps another state than the layer.
        """
        paths: list[str] = []
        unmatched = list(self.overrides)

        def change(path: str, layer: Any, op: Fp8DotGeneral) -> Fp8DotGeneral:
            paths.append(path)
            matching = [pattern for pattern in self.overrides if matches(pattern, path, layer)]
            unmatched[:] = [pattern for pattern in unmatched if pattern not in matching]
            return self._changed(path, op, self.overrides[matching[0]] if matching else self.recipe)

        changed = map_layers_and_ops(change, model, rules)
        if not paths:
            raise ValueError(
                "phases choose recipes of converted layers, and the model has none: convert it first, "
                "fp8_linear_layers(model, recipe), or leave phases out"
            )
        if unmatched:
            raise unmatched_error("overrides of a phase", unmatched[0], paths)
        return changed

    def _changed(self, path: str, op: Fp8DotGeneral, choice: RecipeOfPhase) -> Fp8DotGeneral:
        converted = op.recipe
        if choice is None:
            recipe = Recipe.of(HighPrecision())
        else:
            recipe = as_recipe(choice(converted) if _is_function(choice) else choice)
        if recipe == converted:
            return op
        try:
            if recipe.is_stateful and not converted.is_stateful:
                raise ValueError("it keeps a state, and the layer has none")
            recipe = recipe.with_state_of(converted) if converted.is_stateful else recipe
            if recipe.is_stateful and recipe.state_of != converted:
                raise ValueError("it keeps the state of another recipe")
        except ValueError as error:
            raise ValueError(
                f"the phase from step {self.start} gives {path or 'the model'} the recipe {recipe}, but it was "
                f"converted with {converted}, and a run has one state for all phases: {error}. Convert the layer with "
                "the recipe that keeps state, and let phases use that one, or recipes without state"
            ) from None
        key = op.key
        if recipe.needs_key and key is None:
            key = Fp8DotGeneral.init(recipe, stack=op.stack).key
        return dataclasses.replace(op, recipe=recipe, key=key)


def restored[T](tree: T, model: Any) -> T:
    """Gradients, or a part of them, of a model that `applied` returned, as those of the model itself.

    Args:
        tree: The gradients.
        model: The model.
    """
    of_model = iter(all_ops(model))

    def restore(node: Any) -> Any:
        if not is_op(node):
            return node
        op = next(of_model)
        return dataclasses.replace(node, recipe=op.recipe, key=None if op.key is None else node.key)

    return jax.tree.map(restore, tree, is_leaf=is_op)


def as_phases(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The phases of a run.

    Raises:
        ValueError: If they are not phases in the order of their first steps, the first of which is 0.
    """
    remedy = "a list such as [Phase(0, None), Phase(1000)], in the order of their first steps, the first of them 0"
    if isinstance(phases, str) or not isinstance(phases, Sequence):
        raise ValueError(f"phases={phases!r} of TrainStep must be {remedy}")
    for phase in phases:
        if not isinstance(phase, Phase):
            raise ValueError(f"phases of TrainStep holds {phase!r}; it must be {remedy}")
    starts = [phase.start for phase in phases]
    if starts and (starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False))):
        raise ValueError(f"phases of TrainStep begin at the steps {starts}; give {remedy}")
    return tuple(phases)


def phase_at(phases: tuple[Phase, ...], step: int) -> Phase:
    """The phase that a step is in.

    Args:
        phases: From `as_phases`, at least one.
        step: The number of steps taken before.
    """
    return phases[bisect.bisect_right([phase.start for phase in phases], step) - 1]


def require_phases(model: Any, phases: tuple[Phase, ...], rules: tuple[LayerRule, ...]) -> None:
    """Raises a ValueError if a model cannot be trained in one of the phases, before the first of them begins.

    Args:
        model: A converted model.
        phases: The phases.
        rules: The rules of its layers' classes.
    """
    device = Device.default()
    for phase in phases:
        for converted, op in zip(all_ops(model), all_ops(phase.applied(model, rules)), strict=True):
            # What was converted with `emulate=True` may be emulated in all phases.
            if supported(converted.recipe, device).outcome is not Outcome.REFUSED:
                require_support(op.recipe, supported(op.recipe, device))


def require_counted(opt_state: Any, phases: tuple[Phase, ...]) -> None:
    """Raises a ValueError unless the state says, consistently, how many steps were taken.

    Args:
        opt_state: The optimizer's state in a step with several phases.
        phases: The phases.
    """
    if not isinstance(opt_state, CountedState):
        raise ValueError(
            "opt_state does not say how many steps it has taken, which decides the phase: make it with step.init of "
            "the step with phases, or, after n steps without, training.CountedState(n, opt_state)"
        )
    steps = int(opt_state.steps)
    if steps < 0:
        raise ValueError(f"opt_state.steps={steps} must be at least 0, the number of steps taken")
    # Read only where a phase begins, because reading waits for the step before.
    if all(steps != phase.start for phase in phases):
        return
    counts = [int(count) for _, count in optax.tree.get_all_with_path(opt_state.optimizer, "count") if count.ndim == 0]
    if max(counts, default=0) > steps:
        raise ValueError(
            f"opt_state.steps={steps}, but its optimizer has counted {max(counts)} updates, so that the phase would "
            f"not be that of its learning rate: use training.CountedState({max(counts)}, opt_state.optimizer)"
        )


def _is_function(choice: Any) -> TypeGuard[Callable[[Recipe], Recipe]]:
    return callable(choice) and not isinstance(choice, type)


def _text(choice: RecipeOfPhase, of_recipe: Callable[[Any], str]) -> str:
    if choice is None:
        return "high precision"
    if _is_function(choice):
        return _name(choice).replace("_", " ")
    return choice if isinstance(choice, str) else of_recipe(choice)


def _name(value: Any) -> str:
    """A pattern or a function, in words that are the same in every process."""
    return value if isinstance(value, str) else getattr(value, "pattern", getattr(value, "__name__", "a function"))
