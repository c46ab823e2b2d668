// Tables and texts around the timeline. Names come from users, so all text is set as text.

/** @param {string} id @returns {any} */
function byId(id) {
  return /** @type {any} */ (document.getElementById(id));
}

/** About four figures. @param {number} value */
function figures(value) {
  const size = Math.abs(value);
  return size >= 1000 || Number.isInteger(value) ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : value.toPrecision(4).replace(/\.?0+$/, "");
}
/** @param {number} value */
function secondsText(value) {
  if (value === 0) return "0";
  for (const [unit, size, least] of /** @type {[string, number, number][]} */ ([["d", 86400, 2 * 86400], ["h", 3600, 7200], ["min", 60, 600]])) {
    if (Math.abs(value) >= least) return `${figures(value / size)} ${unit}`;
  }
  for (const [unit, factor] of /** @type {[string, number][]} */ ([["s", 1], ["ms", 1e3], ["µs", 1e6]])) {
    if (Math.abs(value) * factor >= 1) return `${(value * factor).toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")} ${unit}`;
  }
  return `${(value * 1e9).toFixed(0)} ns`;
}
let unitSeconds = 1e-9;  // of the report's times

/** @param {number} time of the report */
function timeText(time) {
  return secondsText(time * unitSeconds);
}
/** @param {number} share */
function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}
/** @param {number} bytes */
function bytesText(bytes) {
  for (const [unit, size] of /** @type {[string, number][]} */ ([["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])) {
    if (bytes >= size) return `${(bytes / size).toFixed(1)} ${unit}`;
  }
  return `${bytes} B`;
}

/** @param {string} tag @param {string} [text] @param {{[name: string]: string}} [attributes] */
function element(tag, text, attributes) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  return node;
}

/**
 * @param {string} caption @param {string[]} head @param {(string | Node)[][]} rows the first cell names the row
 */
function makeTable(caption, head, rows) {
  const table = element("table");
  if (caption) table.append(element("caption", caption));
  const top = element("tr");
  for (const name of head) top.append(name ? element("th", name, { scope: "col" }) : element("td"));
  const body = element("tbody");
  for (const cells of rows) {
    const line = element("tr");
    cells.forEach((cell, place) => {
      const node = place ? element("td") : element("th", undefined, { scope: "row" });
      node.append(cell);
      line.append(node);
    });
    body.append(line);
  }
  const header = element("thead");
  header.append(top);
  table.append(header, body);
  return table;
}

/** A table of all timelines. @param {Report} report @param {Spans[]} timelines */
function showOverview(report, timelines) {
  const first = timelines[0], some = timelines.some((spans) => spans.hasMemory);
  const rows = timelines.map((spans) => {
    const { header } = spans, sums = totalOf(report, wholeSums(report, spans));
    const all = header.makespan * header.numRanks || 1;
    const share = (/** @type {string[]} */ ...names) => percent(names.reduce((sum, name) => sum + sums[report.classes.indexOf(name)], 0) / all);
    return [
      header.name, timeText(header.makespan), header.bound ? (header.makespan / header.bound).toFixed(3) : "–",
      `${(first.header.makespan / header.makespan).toFixed(2)} ×`,
      share("forward", "backward", "recompute"), share("transfer"), share("sync"), share("optimizer"), share("idle"),
      ...(some ? [spans.hasMemory ? bytesText(peakBytes(spans)) : "–"] : []),
    ];
  });
  byId("overview").replaceChildren(makeTable("", ["", "step", "× bound", `speedup over ${first.header.name}`, "compute", "send, receive", "synchronise", "optimizer", "idle", ...(some ? ["peak memory"] : [])], rows));
  const { workload, cluster, numRanks } = first.header;
  byId("subtitle").textContent = `${workload} on ${numRanks} device${numRanks === 1 ? "" : "s"} (${cluster})`;
}

/** @type {WeakMap<Spans, number[][]>} */
const wholeSumsOf = new WeakMap();

/** Sums of each device over its whole step, computed once. @param {Report} report @param {Spans} spans */
function wholeSums(report, spans) {
  let sums = wholeSumsOf.get(spans);
  if (!sums) wholeSumsOf.set(spans, sums = spans.rows.map((_, rank) => deviceSums(report, spans, rank, 0, spans.header.makespan)));
  return sums;
}

/** @param {Report} report @param {number[][]} sums of devices */
function totalOf(report, sums) {
  return report.classes.map((_, place) => sums.reduce((total, each) => total + each[place], 0));
}

const MOST_DEVICES = 64;  // that have a line in the table of sums

/** @param {Report} report @param {Spans[]} shown @param {[number, number] | null} range */
function showSums(report, shown, range) {
  byId("sums-range").textContent = range
    ? `From ${timeText(range[0])} to ${timeText(range[1])}, ${timeText(range[1] - range[0])} of each device. Escape in the timeline leaves the range.`
    : shown[0].fleet ? "Device time from the start of the clock to the end." : "The whole step. Transfers and synchronisation only count while they are exposed, that is, while the device does not compute.";
  /** @type {(string | Node)[][]} */
  const rows = [];
  for (const spans of shown) {
    const each = range ? spans.rows.map((_, rank) => deviceSums(report, spans, rank, ...range)) : wholeSums(report, spans);
    const total = totalOf(report, each);
    const name = shown.length > 1 ? `${spans.header.name}, ` : "";
    rows.push(sumsRow(report, `${name}all devices`, total));
    if (spans.fleet) for (const [group, ranks] of rankGroups(spans)) rows.push(sumsRow(report, `${name}${group}`, totalOf(report, ranks.map((rank) => each[rank]))));
    else if (spans.rows.length > 1) each.slice(0, MOST_DEVICES).forEach((sums, rank) => rows.push(sumsRow(report, `${name}device ${rank}`, sums)));
    if (each.length > MOST_DEVICES && !spans.fleet) rows.push([`${name}${each.length - MOST_DEVICES} more devices`]);
  }
  const names = report.classes.map((name) => ({ transfer: "send, receive", sync: "synchronise" }[name] || name));
  byId("sums").replaceChildren(makeTable("", ["", "", ...names], rows));
}

/** @param {Report} report @param {string} name @param {number[]} sums */
function sumsRow(report, name, sums) {
  const all = sums.reduce((one, other) => one + other, 0) || 1;
  const bar = element("div", undefined, { class: "bar", "aria-hidden": "true" });
  sums.forEach((time, place) => {
    const colour = CLASS_COLOURS[report.classes[place]];
    if (time > 0 && colour) bar.append(element("i", undefined, { style: `width:${(100 * time) / all}%;background:${colour}` }));
  });
  const unbroken = (/** @type {string} */ text) => text.replaceAll(" ", "\u00a0");
  return [name, bar, ...sums.map((time) => (time ? unbroken(`${timeText(time)} (${percent(time / all)})`) : "–"))];
}

/** Names of instructions; where one comes again, with how often it came before. @param {ReportProgram} program */
function distinctNames(program) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  return program.names.map((name) => {
    const count = counts.get(name) || 0;
    counts.set(name, count + 1);
    return count ? `${name}\n${count}` : name;
  });
}

/**
 * Of each span of one timeline, the span of the other that runs the same instruction on the same device, or -1.
 * @param {Spans} spans @param {Spans} other
 */
function matchSpans(spans, other) {
  const numbers = new Map(distinctNames(other.program).map((name, number) => [name, number]));
  const matching = distinctNames(spans.program).map((name) => numbers.get(name));
  const width = other.rows.length;
  const where = new Int32Array(other.program.names.length * width).fill(-1);
  for (let span = 0; span < other.start.length; span++) where[other.instruction[span] * width + other.rank[span]] = span;
  const match = new Int32Array(spans.start.length).fill(-1);
  for (let span = 0; span < match.length; span++) {
    const number = matching[spans.instruction[span]];
    if (number !== undefined && spans.rank[span] < width) match[span] = where[number * width + spans.rank[span]];
  }
  return match;
}

/** @param {Report} report @param {Spans} first @param {Spans} second @param {Int32Array} match of the first's spans */
function showComparison(report, first, second, match) {
  const names = [first.header.name, second.header.name];
  /** @type {Map<string, {count: number, took: number[], waited: number[]}>} */
  const entries = new Map();
  let unmatched = 0;
  for (let span = 0; span < match.length; span++) {
    if (match[span] < 0) { unmatched++; continue; }
    const name = first.program.names[first.instruction[span]];
    let entry = entries.get(name);
    if (!entry) entries.set(name, entry = { count: 0, took: [0, 0], waited: [0, 0] });
    entry.count++;
    entry.took[0] += first.end[span] - first.start[span];
    entry.took[1] += second.end[match[span]] - second.start[match[span]];
    entry.waited[0] += first.waited[span];
    entry.waited[1] += second.waited[match[span]];
  }
  /** @param {"took" | "waited"} what */
  const largest = (what) => [...entries].filter(([, entry]) => entry[what][0] !== entry[what][1])
    .sort(([, one], [, other]) => Math.abs(other[what][1] - other[what][0]) - Math.abs(one[what][1] - one[what][0])).slice(0, 12)
    .map(([name, entry]) => comparisonRow(name, entry[what], entry.count));
  const head = ["", ...names, "difference", "ratio", "devices"];
  const tables = [
    makeTable("Modules: device time of forward and backward", head.slice(0, -1), moduleTimes(report, [first, second]).map(([name, times]) => comparisonRow(name, times, null))),
    ...[["Spans that took longer or shorter (device time)", largest("took")], ["Spans that waited longer or shorter before they began (device time)", largest("waited")]]
      .filter(([, rows]) => rows.length).map(([title, rows]) => makeTable(/** @type {string} */ (title), head, /** @type {any} */ (rows))),
  ];
  const remark = unmatched ? `${unmatched.toLocaleString("en")} of ${match.length.toLocaleString("en")} spans of ${names[0]} have no counterpart in ${names[1]}, because they run on other devices or contain other layers.` : "Every span has a counterpart.";
  byId("comparison").replaceChildren(element("p", remark), ...tables);
}

/** @param {string} name @param {number[]} times @param {number | null} count */
function comparisonRow(name, times, count) {
  const [before, after] = times;
  const sign = after > before ? "+" : after < before ? "−" : "";
  const cells = [name, timeText(before), timeText(after), `${sign}${timeText(Math.abs(after - before))}`, before > 0 ? `${(after / before).toFixed(2)} ×` : "–"];
  return count === null ? cells : [...cells, `${count}`];
}

/** @param {Report} report @param {Spans[]} shown @returns {[string, number[]][]} */
function moduleTimes(report, shown) {
  const times = report.groups.map(() => shown.map(() => 0));
  shown.forEach((spans, which) => {
    for (let span = 0; span < spans.start.length; span++) {
      const group = spans.program.groups[spans.instruction[span]];
      if (group >= 0) times[group][which] += spans.end[span] - spans.start[span];
    }
  });
  return report.groups.map((name, place) => /** @type {[string, number[]]} */ ([name, times[place]])).filter(([, each]) => each.some((time) => time > 0));
}

/** @param {Report} report @param {string} by @param {boolean} two */
function showLegend(report, by, two) {
  /** @type {[string, string, boolean][]} */
  let entries;
  if (by === "difference" && two) {
    entries = [["over 2 % longer than its match", LONGER, false], ["over 2 % shorter", SHORTER, false], ["about as long", SAME, false], ["no match", UNMATCHED, false]];
  } else if (by === "kind") {
    entries = report.kinds.map((kind) => [kind, report.colours[/** @type {any} */ (KIND_COLOURS)[kind]], STRIPED.includes(kind)]);
  } else if (report.kind === "fleet") {
    entries = by === "task" ? report.tasks.slice(0, 40).map((name, place) => [name, report.colours[place % report.colours.length], false]) : [["training: each job has its colour", report.colours[0], false]];
    entries.push(["reallocation: striped", report.colours[0], true], ["lost to a fault: darker, striped", darkened(report.colours[0]), true], ["node down", NEUTRAL.down, true]);
  } else {
    const names = by === "task" ? report.tasks : report.groups;
    entries = names.slice(0, 40).map((name, place) => [name, report.colours[place % report.colours.length], false]);
    entries.push(["backward: darker, striped", darkened(report.colours[0]), true]);
    for (const kind of /** @type {(keyof typeof NEUTRAL)[]} */ (["transfer", "sync", "gather", "optimizer"])) entries.push([kind, NEUTRAL[kind], false]);
  }
  byId("legend").replaceChildren(...entries.map(([name, colour, striped]) => {
    const entry = element("span");
    const light = mixed(colour, "#ffffff", 0.45);
    entry.append(element("i", undefined, { style: striped ? `background:repeating-linear-gradient(135deg,${colour} 0 3px,${light} 3px 4px)` : `background:${colour}` }), name);
    return entry;
  }));
}

/** What a span is. @param {Spans} spans @param {number} span */
function spanText(spans, span) {
  const number = spans.instruction[span];
  const { names, details } = spans.program;
  const waited = spans.waited[span] > 0 ? `, after waiting ${timeText(spans.waited[span])}` : "";
  return [
    names[number], `device ${spans.rank[span]}: ${timeText(spans.end[span] - spans.start[span])}, from ${timeText(spans.start[span])} to ${timeText(spans.end[span])}${waited}`,
    ...(details[number] ? [details[number]] : []),
  ];
}
