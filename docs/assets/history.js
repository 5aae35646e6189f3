// Delayed scaling with sliders: how history and margin decide what fits. No network, no library.
(function () {
  "use strict";
  const fp8 = (window.haliaxFp8 = window.haliaxFp8 || {});
  const STEPS = 64;
  const LENGTHS = [1, 2, 4, 8, 16, 32, 64];

  // The largest value that fits at each step: `scale * max`, from the amaxes of the steps before; the first scale is 1.
  fp8.limits = function (amaxes, length, margin, max) {
    return amaxes.map((_, step) => {
      const largest = Math.max(0, ...amaxes.slice(Math.max(0, step - length), step));
      return largest > 0 ? largest * 2 ** margin : step ? NaN : max;
    });
  };

  // Always the same noise, so that only the sliders change the picture.
  const noise = (step) => 1 + 0.25 * Math.sin(12.9898 * step) + 0.12 * Math.sin(78.233 * step);
  const SIGNALS = {
    "one spike": (step) => (step === 20 ? 12 : 2 * noise(step)),
    "a tensor that grows": (step) => 0.5 * 1.06 ** step * noise(step),
    "a fall, as after warmup": (step) => (step < 24 ? 8 : 1) * noise(step),
    "only noise": (step) => 3 * noise(step),
  };

  function draw(root, state) {
    const amaxes = Array.from({ length: STEPS }, (_, step) => SIGNALS[state.signal](step));
    const limits = fp8.limits(amaxes, LENGTHS[state.length], state.margin, 448);
    // Of the first step there is no history.
    const clipped = amaxes.map((amax, step) => step > 0 && amax > limits[step] * (1 + 1e-9));
    const top = 1.08 * Math.max(...amaxes, ...limits.slice(1));
    const [wide, high] = [640, 240];
    const x = (step) => (wide * step) / STEPS;
    const y = (value) => high - (high * value) / top;
    const bars = amaxes.map((amax, step) => {
      const kind = clipped[step] ? "clipped" : "fits";
      return `<rect class="${kind}" x="${x(step) + 1.5}" y="${y(amax)}" width="${wide / STEPS - 3}" height="${high - y(amax)}"/>`;
    });
    const marks = amaxes.map((amax, step) => (clipped[step] ? `<text x="${x(step + 0.5)}" y="${y(amax) - 3}">▾</text>` : ""));
    const path = limits.slice(1).map((limit, i) => `${i ? "L" : "M"}${x(i + 1)} ${y(limit)}H${x(i + 2)}`);
    root.querySelector("svg").innerHTML = `${bars.join("")}<path d="${path.join("")}"/>${marks.join("")}`;
    const unused = limits.slice(1).map((limit, i) => Math.max(0, Math.log2(limit / amaxes[i + 1])));
    const mean = unused.reduce((sum, value) => sum + value, 0) / unused.length;
    root.querySelector("output").textContent =
      `Clipped in ${clipped.filter(Boolean).length} of ${STEPS - 1} steps; on average ${mean.toFixed(1)} binades of the ` +
      "range are unused.";
    root.querySelector(".length").textContent = LENGTHS[state.length];
    root.querySelector(".margin").textContent = state.margin;
  }

  function start(root) {
    const options = Object.keys(SIGNALS).map((name) => `<option>${name}</option>`).join("");
    root.innerHTML =
      `<div class="fp8-controls"><label>tensor <select>${options}</select></label>` +
      `<label>history <input type="range" min="0" max="${LENGTHS.length - 1}" value="4"> <b class="length"></b></label>` +
      '<label>margin <input type="range" min="0" max="3" value="0"> <b class="margin"></b></label></div>' +
      '<svg viewBox="0 0 640 240" role="img" aria-label="Bars for the amax of each step, and a line for what fits"></svg>' +
      '<p class="fp8-note"><output></output> Bars: amax of each step. Line: the largest value that fits, ' +
      "<code>max(history) · 2^margin</code>. Marked bars stand out above it and are clipped.</p>";
    const [length, margin] = root.querySelectorAll("input");
    const signal = root.querySelector("select");
    const read = () => draw(root, { signal: signal.value, length: Number(length.value), margin: Number(margin.value) });
    [length, margin, signal].forEach((input) => input.addEventListener("input", read));
    read();
  }

  document.querySelectorAll(".fp8-history").forEach(start);
})();
