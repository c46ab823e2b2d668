// Curves with uPlot.

/** @type {uPlot[]} */
let charts = [];

/** @param {string} name */
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A step of the axis of at least so many seconds: 1, 2 or 5 of a power of ten, or of minutes, hours and days. @param {number} least */
function niceStep(least) {
  if (least > 20) {
    const days = 10 ** Math.max(0, Math.floor(Math.log10(least / 86400)));
    const steps = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, ...[1, 2, 5, 10].map((factor) => factor * days * 86400)];
    return steps.find((size) => size >= least * 0.999) || least;
  }
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * 0.999) || least;
}

/** Colours of lines that can be read on the page's background. @param {Report} report @param {number} place */
function lineColour(report, place) {
  const colour = report.colours[place % report.colours.length];
  const dark = matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
  return channels(colour).every((value) => value < 60) && dark ? "#c8ccd4" : colour;
}

/**
 * @param {HTMLElement} parent @param {string} title @param {any[]} series @param {any[]} data
 * @param {{log?: boolean, unit?: (value: number) => string, x: string, xText?: (value: number) => string, marks?: {at: number, label: string}[]}} options
 */
function addChart(parent, title, series, data, options) {
  const holder = document.createElement("div");
  holder.className = "chart";
  const heading = document.createElement("h3");
  heading.textContent = title;
  holder.append(heading);
  parent.append(holder);
  const ink = style("quiet"), grid = style("line"), unit = options.unit || ((value) => `${value}`);
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
  const marks = options.marks || [];
  const chart = new uPlot({
    width: Math.max(300, Math.min(560, holder.clientWidth || 400)), height: 220,
    cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false, ...(options.log ? { distr: 3, log: 2 } : {}) }, y: { range: (/** @type {any} */ _, /** @type {number | null} */ low, /** @type {number | null} */ high) => (low === null || high === null ? [null, null] : low === 0 && high === 0 ? [0, 1] : /** @type {any} */ (uPlot).rangeNum(low, high, 0.1, true)) } },
    axes: [
      { ...axis, label: options.x, labelSize: 18, ...(options.log ? { values: (/** @type {any} */ _, /** @type {any[]} */ values) => values.map((value) => (value == null ? "" : `${value}`)) } : {}) },
      { ...axis, size: 64, values: (/** @type {any} */ _, /** @type {number[]} */ values) => values.map(unit) },
    ],
    series: [{ label: options.x, ...(options.xText ? { value: (/** @type {any} */ _, /** @type {number | null} */ value) => (value == null || !options.xText ? "–" : options.xText(value)) } : {}) }, ...series.map((entry) => ({ spanGaps: true, value: (/** @type {any} */ _, /** @type {number | null} */ value) => (value == null ? "–" : unit(value)), ...entry }))],
    hooks: { draw: [(/** @type {any} */ plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = ink;
      ctx.setLineDash([4, 4]);
      for (const mark of marks) {
        const x = plot.valToPos(mark.at, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.fillText(mark.label, x + 3, bbox.top + 10);
      }
      ctx.restore();
    }] },
  }, data, holder);
  charts.push(chart);
}

/** @param {Report} report */
function drawCharts(report) {
  for (const chart of charts) chart.destroy();
  charts = [];
  const curves = byId("curves"), run = byId("run");
  curves.replaceChildren();
  run.replaceChildren();
  byId("curves-section").hidden = !report.curves.length;
  byId("run-section").hidden = !report.steps;
  const fixed = report.curves.filter(({ curves: entries }) => entries.every((entry) => entry.devices.length < 2));
  byId("fixed").textContent = fixed.length ? `On one number of devices only: ${fixed.map(({ module }) => module).join(", ")}.` : "";
  for (const { module, curves: entries, more } of report.curves.filter((curve) => !fixed.includes(curve))) {
    const counts = [...new Set(entries.flatMap((entry) => entry.devices))].sort((one, other) => one - other);
    /** @type {any[]} */
    const series = [], data = [/** @type {any} */ (counts)];
    entries.forEach((entry, place) => {
      const at = new Map(entry.devices.map((count, index) => [count, entry.seconds[index]]));
      const colour = lineColour(report, place);
      const name = entry.name + (entry.ops > 1 ? ` and ${entry.ops - 1} more` : "") + (entry.degree > 1 ? `, tensor degree ${entry.degree}` : "");
      // Filled points were measured; hollow ones lie between measurements. Where nothing was measured, all are computed.
      const hollow = entry.measured.length > 0;
      series.push({ label: name, stroke: colour, width: 1.5, points: { show: true, size: 6, width: 1, stroke: colour, fill: hollow ? style("background") : colour } });
      data.push(counts.map((count) => at.get(count) ?? null));
      if (hollow) {
        series.push({ label: "measured", class: "quiet", stroke: colour, width: 0, paths: () => null, points: { show: true, size: 6, fill: colour } });
        data.push(counts.map((count) => (entry.measured.includes(count) ? at.get(count) ?? null : null)));
      }
      series.push({ label: "chosen", class: "quiet", stroke: colour, width: 0, paths: () => null, points: { show: true, size: 14, width: 2, stroke: colour, fill: "#00000000" } });
      data.push(counts.map((count) => (entry.chosen.includes(count) ? at.get(count) ?? null : null)));
      series.push({ label: "evenly", class: "quiet", stroke: colour, width: 1, dash: [3, 4], points: { show: false } });
      data.push(counts.map((count) => (count >= entry.devices[0] ? (entry.seconds[0] * entry.devices[0]) / count : null)));
    });
    addChart(curves, module + (more ? ` (${more} more curves are not shown)` : ""), series, data, { log: counts.length > 1, unit: secondsText, x: "devices" });
  }
  if (report.steps) {
    const { steps, series, plans } = report.steps;
    const marks = plans.filter((plan) => plan.step > steps[0]).map((plan) => ({ at: plan.step, label: plan.planner }));
    const losses = Object.keys(series).filter((tag) => tag.startsWith("losses/"));
    const shown = losses.length ? losses : ["loss"];
    addChart(run, "Losses by task", shown.map((tag, place) => ({ label: tag.replace("losses/", ""), stroke: lineColour(report, place), width: 1.5 })), [steps, ...shown.map((tag) => series[tag])], { unit: figures, x: "step", marks });
    const times = ["step_s", "predicted_s"].filter((tag) => series[tag]);
    if (times.length) addChart(run, "Time of a step", times.map((tag, place) => ({ label: tag === "step_s" ? "measured" : "predicted", stroke: lineColour(report, place), width: 1.5, dash: place ? [5, 4] : undefined })), [steps, ...times.map((tag) => series[tag])], { unit: secondsText, x: "step", marks });
    for (const [tag, title, unit] of /** @type {[string, string, (value: number) => string][]} */ ([["idle", "Idle share of device time", percent], ["grad_norm", "Norm of gradients", figures], ["samples_per_s", "Samples/s", figures]])) {
      if (series[tag] && series[tag].some((value) => value !== null)) addChart(run, title, [{ label: title, stroke: lineColour(report, 0), width: 1.5 }], [steps, series[tag]], { unit, x: "step", marks });
    }
  }
}
