// The number explorer: a value, and what each format makes of it. No network, no library.
(function () {
  "use strict";
  const fp8 = (window.haliaxFp8 = window.haliaxFp8 || {});

  // kind: which patterns are not numbers. fn: only all ones is NaN; ieee: infinities and NaN; fnuz: only what would be
  // -0 is NaN; finite: none; scale: no sign, no zero, all ones is NaN.
  const FORMATS = (fp8.FORMATS = {
    E4M3: { exponent: 4, mantissa: 3, bias: 7, kind: "fn" },
    E5M2: { exponent: 5, mantissa: 2, bias: 15, kind: "ieee" },
    E4M3FNUZ: { exponent: 4, mantissa: 3, bias: 8, kind: "fnuz" },
    E5M2FNUZ: { exponent: 5, mantissa: 2, bias: 16, kind: "fnuz" },
    E2M1: { exponent: 2, mantissa: 1, bias: 1, kind: "finite" },
    E8M0: { exponent: 8, mantissa: 0, bias: 127, kind: "scale" },
  });

  const signBits = (format) => (format.kind === "scale" ? 0 : 1);
  const width = (format) => signBits(format) + format.exponent + format.mantissa;

  // The number that a pattern of bits stands for.
  const decode = (fp8.decode = function (format, pattern) {
    const ones = (1 << format.exponent) - 1;
    const exponent = (pattern >> format.mantissa) & ones;
    const mantissa = pattern & ((1 << format.mantissa) - 1);
    if (format.kind === "scale") return exponent === ones ? NaN : 2 ** (exponent - format.bias);
    const negative = pattern >> (format.exponent + format.mantissa);
    if (format.kind === "fnuz" && negative && exponent === 0 && mantissa === 0) return NaN;
    if (format.kind === "fn" && exponent === ones && mantissa === (1 << format.mantissa) - 1) return NaN;
    if (format.kind === "ieee" && exponent === ones) return mantissa ? NaN : negative ? -Infinity : Infinity;
    const fraction = mantissa / 2 ** format.mantissa;
    const size = exponent ? 2 ** (exponent - format.bias) * (1 + fraction) : 2 ** (1 - format.bias) * fraction;
    return negative ? -size : size;
  });

  // Finite values from the smallest magnitude on, with their patterns; of negative numbers these with the sign set.
  const tables = new Map();
  function positives(format) {
    if (!tables.has(format)) {
      const rows = [];
      const count = 2 ** (width(format) - signBits(format));
      for (let pattern = 0; pattern < count; pattern++) {
        const value = decode(format, pattern);
        if (Number.isFinite(value)) rows.push({ pattern, value });
      }
      tables.set(format, rows);
    }
    return tables.get(format);
  }

  // Rounds to nearest, ties to the even pattern, and clips at the largest value, as the library does.
  fp8.round = function (format, x) {
    const rows = positives(format);
    const largest = rows[rows.length - 1];
    const isScale = format.kind === "scale";
    if (Number.isNaN(x) || (isScale && x <= 0)) return { value: NaN, note: isScale ? "scales are positive" : "NaN stays" };
    const size = Math.abs(x);
    const sign = x < 0 || Object.is(x, -0) ? -1 : 1;
    let above = rows.findIndex((row) => row.value >= size);
    let below = above;
    let nearest;
    if (above === -1) {
      above = below = rows.length - 1;
      nearest = largest;
    } else {
      if (rows[above].value > size && above > 0) below = above - 1;
      const up = rows[above].value - size;
      const down = size - rows[below].value;
      const even = rows[below].pattern % 2 === 0 ? rows[below] : rows[above];
      nearest = up === down ? even : up < down ? rows[above] : rows[below];
    }
    // Without a negative zero, what rounds to zero is the one zero.
    const signed = sign < 0 && !(format.kind === "fnuz" && nearest.value === 0);
    const pattern = nearest.pattern + (signed ? 2 ** (width(format) - 1) : 0);
    const normal = 2 ** (1 - format.bias);
    let note = "";
    if (size > largest.value) note = "clipped at the maximum";
    else if (nearest.value === 0 && size > 0) note = "becomes zero";
    else if (isScale && size < rows[0].value) note = "clipped at the minimum";
    else if (!isScale && nearest.value > 0 && nearest.value < normal) note = "subnormal: fewer digits";
    const [low, high] = [sign * rows[below].value, sign * rows[above].value].sort((a, b) => a - b);
    return { value: sign * nearest.value, pattern, below: low, above: high, note, saturated: size > largest.value };
  };

  const print = (value) => (Number.isNaN(value) ? "NaN" : String(Number(value.toPrecision(6))));

  function bits(format, pattern) {
    if (pattern === undefined) return "";
    const text = pattern.toString(2).padStart(width(format), "0");
    const sign = text.slice(0, signBits(format));
    const exponent = text.slice(signBits(format), signBits(format) + format.exponent);
    const mantissa = text.slice(signBits(format) + format.exponent);
    const part = (kind, digits) => (digits ? `<span class="${kind}">${digits}</span>` : "");
    return `<code class="fp8-bits">${part("sign", sign)}${part("exponent", exponent)}${part("mantissa", mantissa)}</code>`;
  }

  function show(table, x) {
    const rows = Object.entries(FORMATS).map(([name, format]) => {
      const found = fp8.round(format, x);
      const error = x !== 0 && Number.isFinite(x) ? `${Number(((100 * Math.abs(found.value - x)) / Math.abs(x)).toPrecision(3))}&nbsp;%` : "";
      const cells = [
        `<b>${name}</b>`,
        bits(format, found.pattern),
        `<b>${print(found.value)}</b>`,
        Number.isNaN(found.value) ? "" : error,
        found.below === undefined ? "" : print(found.below),
        found.above === undefined ? "" : print(found.above),
        found.note,
      ];
      return `<tr>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
    });
    const heads = ["format", "bits", "rounded", "error", "below", "above", ""].map((head) => `<th>${head}</th>`).join("");
    table.innerHTML = `<thead><tr>${heads}</tr></thead><tbody>${rows.join("")}</tbody>`;
  }

  function start(root) {
    root.innerHTML =
      '<div class="fp8-controls"><label>value <input type="text" inputmode="decimal" value="0.3" size="12"></label>' +
      '<label>magnitude <input type="range" min="-20" max="18" step="0.01"></label></div>' +
      '<div class="fp8-scroll"><table></table></div>' +
      '<p class="fp8-note">Rounded to nearest, ties to even, and clipped, with a scale of 1. Colours: sign, exponent, ' +
      "mantissa. E8M0 holds MXFP8's scales, which the library rounds up instead.</p>";
    const [text, slider] = root.querySelectorAll("input");
    const table = root.querySelector("table");
    const read = () => {
      const x = Number(text.value.trim().replace(",", ".") || NaN);
      if (Number.isFinite(x) && x !== 0) slider.value = Math.log2(Math.abs(x));
      show(table, x);
    };
    text.addEventListener("input", read);
    slider.addEventListener("input", () => {
      const sign = text.value.trim().startsWith("-") ? -1 : 1;
      text.value = String(Number((sign * 2 ** Number(slider.value)).toPrecision(4)));
      show(table, Number(text.value));
    });
    read();
  }

  document.querySelectorAll(".fp8-formats").forEach(start);
})();
