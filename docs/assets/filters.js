// Filters above a table: a choice for each column that `data-filters` numbers, and a text for all columns.
(function () {
  "use strict";

  function start(root) {
    const rows = [...root.querySelectorAll("tbody tr")];
    const heads = [...root.querySelectorAll("thead th")].map((head) => head.textContent);
    const columns = root.dataset.filters.split(" ").map(Number);
    const controls = document.createElement("div");
    controls.className = "fp8-controls";
    const choices = columns.map((column) => {
      const values = [...new Set(rows.map((row) => row.cells[column].textContent))].sort();
      const label = document.createElement("label");
      label.append(`${heads[column]} `);
      const select = document.createElement("select");
      select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
      label.append(select);
      controls.append(label);
      return { column, select };
    });
    const label = document.createElement("label");
    const text = document.createElement("input");
    text.type = "search";
    text.size = 12;
    label.append("contains ", text);
    const count = document.createElement("output");
    controls.append(label, count);
    root.prepend(controls);

    const apply = () => {
      const wanted = text.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row) => {
        const fits = choices.every(({ column, select }) => !select.value || row.cells[column].textContent === select.value);
        row.hidden = !(fits && row.textContent.toLowerCase().includes(wanted));
        shown += row.hidden ? 0 : 1;
      });
      count.textContent = `${shown} of ${rows.length}`;
    };
    controls.addEventListener("input", apply);
    apply();
  }

  document.querySelectorAll(".fp8-filtered").forEach(start);
})();
