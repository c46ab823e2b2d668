// What a report of a fleet shows instead of what belongs to steps: devices of nodes, attempts of jobs, rounds.

const MILLION = 1e6;  // utilities, prices and rates are whole millionths
const MOST_JOBS = 40, MOST_LINES = 30;  // that tables show

/**
 * A timeline of a fleet as spans: a device is a rank, what it does for one attempt of a job an instruction.
 * @param {Report} report @param {Map<string, Float64Array>} columns @param {number} number @returns {Spans}
 */
function makeFleetSpans(report, columns, number) {
  const header = /** @type {FleetHeader} */ (report.timelines[number]);
  /** @param {string} name */
  const column = (name) => columns.get(`${number}.${name}`) || new Float64Array(0);
  const attempts = {
    job: column("attempt.job"), number: column("attempt.number"), kind: column("attempt.kind"), devices: column("attempt.devices"),
    start: column("attempt.start"), ready: column("attempt.ready"), end: column("attempt.end"), lost: column("attempt.lost"),
    estimated: column("attempt.estimated"), step: column("attempt.step"), rate: column("attempt.rate"),
  };
  const jobs = {
    number: column("job.number"), team: column("job.team"), phase: column("job.phase"), arrival: column("job.arrival"),
    completion: column("job.completion"), wait: column("job.wait"), reallocations: column("job.reallocations"),
  };
  const kinds = [...new Set(header.nodes.map(([, kind]) => kind))];
  const rounds = {
    time: column("round.time"), waiting: column("round.waiting"), utility: column("round.utility"), bound: column("round.bound"),
    prices: kinds.map((_, kind) => column(`round.price.${kind}`)),
  };
  /** @type {{node: string, kind: number, place: number}[]} */
  const devices = header.nodes.flatMap(([node, kind, count]) => Array.from({ length: count }, (_, place) => ({ node, kind: kinds.indexOf(kind), place })));
  const place = new Map(Array.from(jobs.number, (job, index) => [job, index]));
  /** @type {Map<number, number[]>} */
  const attemptsOf = new Map();
  attempts.job.forEach((job, attempt) => attemptsOf.set(job, [...(attemptsOf.get(job) || []), attempt]));
  /** @type {Map<number, [number, number, number, number][]>} */
  const waitsOf = new Map();
  for (const wait of header.waits) waitsOf.set(wait[0], [...(waitsOf.get(wait[0]) || []), wait]);
  const fleet = { header, attempts, jobs, rounds, kinds, devices, place, attemptsOf, waitsOf };
  const gap = column("gap"), count = gap.length, none = new Float64Array(count);
  const columnsOf = new Map([...columns, ...["lane", "waited", "after", "bytes_at_start", "bytes_at_end"].map((name) => /** @type {[string, Float64Array]} */ ([`${number}.${name}`, none])), [`${number}.static_bytes`, new Float64Array(header.numRanks)]]);
  const spans = makeSpans({ ...report, programs: [fleetProgram(report, fleet)] }, columnsOf, number);
  spans.rows.forEach((rows, rank) => {
    if (rows.length) return;
    const before = rank ? spans.rows[rank - 1][0].to : 0;
    rows.push({ lane: 0, from: before, to: before });  // a device that was never used has a row, too
  });
  for (let span = 0; span < count; span++) {
    const attempt = attemptOf(fleet, spans.instruction[span]);
    if (attempt >= 0 && attempts.start[attempt] === spans.start[span]) {
      const wait = (waitsOf.get(attempts.job[attempt]) || []).find(([, , to]) => to === spans.start[span]);
      if (wait) spans.waited[span] = wait[2] - wait[1];
    }
  }
  spans.fleet = fleet;
  header.numSpans = count;
  return spans;
}

/** The attempt of an instruction, -1 for a node that is down. @param {FleetData} fleet @param {number} instruction */
function attemptOf(fleet, instruction) {
  const attempt = Math.floor(instruction / 3);
  return attempt < fleet.attempts.job.length ? attempt : -1;
}

/** @param {Report} report @param {FleetData} fleet @returns {ReportProgram} */
function fleetProgram(report, fleet) {
  /** @type {ReportProgram} */
  const program = { names: [], kinds: [], groups: [], tasks: [], details: [], recompute: [] };
  /** @param {string} name @param {number} kind @param {number} group @param {number} task */
  const add = (name, kind, group, task) => {
    program.names.push(name);
    program.kinds.push(kind);
    program.groups.push(group);
    program.tasks.push(task);
    program.details.push("");
    program.recompute.push(0);
  };
  fleet.attempts.job.forEach((job) => {
    const team = fleet.jobs.team[/** @type {number} */ (fleet.place.get(job))];
    for (let kind = 0; kind < 3; kind++) add(report.groups[job], kind, job, team);
  });
  for (const [node] of fleet.header.faults) add(`${node} is down`, 3, -1, -1);
  return program;
}

/** `device 3 of node1 (A100)`. @param {Spans} spans @param {number} rank */
function deviceName(spans, rank) {
  if (!spans.fleet) return `device ${rank}`;
  const { node, kind, place } = spans.fleet.devices[rank];
  return `device ${place} of ${node} (${spans.fleet.kinds[kind]})`;
}

/** What stands beside a row. @param {Spans} spans @param {number[]} ranks */
function rowLabel(spans, ranks) {
  if (!spans.fleet) return rangesOf(ranks);
  const { node, kind, place } = spans.fleet.devices[ranks[0]];
  if (ranks.length > 1) return `${node}… (${ranks.length})`;
  return place ? "" : `${node} ${spans.fleet.kinds[kind]}`;
}

/** `4 x A100`. @param {FleetData} fleet @param {number} attempt */
function cellText(fleet, attempt) {
  return `${fleet.attempts.devices[attempt]} x ${fleet.kinds[fleet.attempts.kind[attempt]]}`;
}

/** What a span of a fleet is. @param {Report} report @param {Spans} spans @param {number} span */
function fleetSpanText(report, spans, span) {
  const fleet = /** @type {FleetData} */ (spans.fleet), { attempts } = fleet;
  const attempt = attemptOf(fleet, spans.instruction[span]);
  const where = `${deviceName(spans, spans.rank[span])}: ${timeText(spans.end[span] - spans.start[span])}, from ${timeText(spans.start[span])} to ${timeText(spans.end[span])}`;
  const name = spans.program.names[spans.instruction[span]];
  if (attempt < 0) return [name, where];
  const kind = report.kinds[spans.program.kinds[spans.instruction[span]]];
  const lines = [name, `${{ training: "training", reallocation: "starting: checkpoint, processes, plan", lost: "training that a fault lost" }[kind]}; attempt ${attempts.number[attempt]} in ${cellText(fleet, attempt)}`, where];
  if (spans.waited[span] > 0) lines.push(`after waiting ${timeText(spans.waited[span])}`);
  const estimated = attempts.estimated[attempt], step = attempts.step[attempt];
  if (estimated > 0) lines.push(`step ${timeText(estimated)} estimated${step > 0 ? `, ${timeText(step)} measured (${(step / estimated).toFixed(2)} ×)` : ""}`);
  return lines;
}

/** The last round up to a time, -1 for none. @param {FleetData} fleet @param {number} time */
function roundAt(fleet, time) {
  const { time: times } = fleet.rounds;
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Why a device of a fleet is idle. @param {Report} report @param {Spans} spans @param {number} rank @param {{from: number, to: number}} gap @returns {string[]} */
function fleetGapLines(report, spans, rank, gap) {
  const fleet = /** @type {FleetData} */ (spans.fleet), { kind } = fleet.devices[rank];
  const waiting = fleet.header.waits.filter(([, from, to]) => from < gap.to && to > gap.from);
  const lines = [];
  if (!waiting.length) lines.push("No job waited for devices then: every job had those that were worth most to it.");
  else {
    const [job, from, to, reason] = waiting.reduce((best, wait) => (Math.min(wait[2], gap.to) - Math.max(wait[1], gap.from) > Math.min(best[2], gap.to) - Math.max(best[1], gap.from) ? wait : best));
    lines.push(`${waiting.length} job${waiting.length === 1 ? "" : "s"} waited meanwhile, longest ${report.groups[job]} (${timeText(Math.min(to, gap.to) - Math.max(from, gap.from))}): ${fleet.header.reasons[reason] || "until the next round"}.`);
  }
  const round = roundAt(fleet, (gap.from + gap.to) / 2), prices = fleet.rounds.prices[kind];
  if (round >= 0) {
    const price = prices.length ? `a device of kind ${fleet.kinds[kind]} cost ${figures(prices[round] / MILLION)}; ` : "";
    const bound = fleet.rounds.bound[round];
    lines.push(`In the round at ${timeText(fleet.rounds.time[round])}, ${price}${fleet.rounds.waiting[round]} jobs waited after it${bound ? `; its utility was ${percent(fleet.rounds.utility[round] / bound)} of the bound` : ""}.`);
  }
  return lines;
}

/** A table of all policies. @param {Report} report @param {Spans[]} timelines */
function showFleetOverview(report, timelines) {
  const headers = timelines.map((spans) => /** @type {FleetHeader} */ (spans.header));
  const hours = (/** @type {number} */ value) => (value >= 2 ? `${figures(Number(value.toPrecision(4)))} h` : secondsText(value * 3600));
  const named = headers.some((header) => header.name !== header.planner);
  const rows = headers.map((header) => {
    const { measures } = header;
    return [
      header.name, ...(named ? [header.planner] : []), secondsText(measures.jctMean), `${(measures.jctMean / headers[0].measures.jctMean).toFixed(3)} ×`, secondsText(measures.jctMedian), secondsText(measures.jctP99),
      secondsText(measures.makespan), figures(Number(measures.throughput.toPrecision(4))), secondsText(measures.longestWait),
      figures(measures.reallocations), hours(measures.reallocationHours), hours(measures.lostHours),
    ];
  });
  byId("overview").replaceChildren(makeTable("", ["", ...(named ? ["policy"] : []), "mean JCT", `relative to ${headers[0].name}`, "median JCT", "p99 JCT", "makespan", "throughput", "longest wait", "reallocations", "device time for them", "lost to faults"], rows));
  const { workload, cluster, numRanks, nodes } = headers[0], count = timelines[0].fleet ? timelines[0].fleet.jobs.number.length : 0;
  byId("subtitle").textContent = `${count.toLocaleString("en")} jobs of ${workload} on ${numRanks.toLocaleString("en")} devices in ${nodes.length.toLocaleString("en")} nodes (${cluster}). JCT: job completion time, from arrival to the end.`;
}

/** Sums by kind of device, and by node where there are few. @param {Spans} spans @returns {[string, number[]][]} names and ranks */
function rankGroups(spans) {
  const fleet = /** @type {FleetData} */ (spans.fleet);
  /** @type {[string, number[]][]} */
  const groups = fleet.kinds.map((name, kind) => [`${name}, all`, fleet.devices.flatMap((device, rank) => (device.kind === kind ? [rank] : []))]);
  let rank = 0;
  for (const [node, , count] of fleet.header.nodes.slice(0, MOST_DEVICES)) {
    groups.push([node, Array.from({ length: count }, (_, place) => rank + place)]);
    rank += count;
  }
  return groups;
}

/** Which jobs gain and which lose. @param {Report} report @param {Spans} first @param {Spans} second */
function showFleetComparison(report, first, second) {
  const ours = /** @type {FleetData} */ (first.fleet), theirs = /** @type {FleetData} */ (second.fleet);
  /** @type {[number, number, number][]} */
  const pairs = [];
  ours.jobs.number.forEach((job, place) => {
    const other = theirs.place.get(job);
    if (other !== undefined) pairs.push([job, ours.jobs.completion[place] - ours.jobs.arrival[place], theirs.jobs.completion[other] - theirs.jobs.arrival[other]]);
  });
  const faster = pairs.filter(([, before, after]) => after < before * 0.99).length, slower = pairs.filter(([, before, after]) => after > before * 1.01).length;
  const head = ["", first.header.name, second.header.name, "difference", "ratio"];
  const sorted = [...pairs].sort((one, other) => one[2] - one[1] - (other[2] - other[1]));
  const table = (/** @type {string} */ caption, /** @type {[number, number, number][]} */ rows) => makeTable(caption, head, rows.map(([job, before, after]) => comparisonRow(report.groups[job], [before, after], null)));
  byId("comparison").replaceChildren(
    element("p", `Of ${pairs.length.toLocaleString("en")} jobs in both, ${faster.toLocaleString("en")} are done over 1 % earlier under ${second.header.name} than under ${first.header.name}, ${slower.toLocaleString("en")} over 1 % later.`),
    table(`Job completion times: the most time saved under ${second.header.name}`, sorted.slice(0, 8).filter(([, before, after]) => after < before)),
    table("The most time lost", sorted.reverse().slice(0, 8).filter(([, before, after]) => after > before)),
  );
}

/** Values of a step function at other times. @param {ArrayLike<number>} times @param {ArrayLike<number>} values @param {number[]} at sorted */
function held(times, values, at) {
  let place = 0;
  return at.map((time) => {
    while (place < times.length && times[place] <= time) place++;
    return place ? values[place - 1] : null;
  });
}

/** Queue, devices in use, prices and bound over time. @param {Report} report @param {Spans[]} shown */
function drawFleetCharts(report, shown) {
  for (const chart of charts) chart.destroy();
  charts = [];
  const run = byId("run");
  run.replaceChildren();
  const whole = Math.max(...shown.map((spans) => spans.header.makespan)) * unitSeconds;
  const [x, size] = /** @type {[string, number]} */ (whole > 4 * 86400 ? ["days", 86400] : whole > 3 * 3600 ? ["hours", 3600] : ["minutes", 60]);
  const scale = unitSeconds / size;
  /** @param {string} title @param {{label: string, times: ArrayLike<number>, values: ArrayLike<number>, place: number, dash?: number[]}[]} entries @param {(value: number) => string} unit */
  const add = (title, entries, unit) => {
    if (!entries.length) return;
    const times = [...new Set(entries.flatMap((entry) => Array.from(entry.times)))].sort((one, other) => one - other);
    const series = entries.map(({ label, place, dash }) => ({ label, stroke: lineColour(report, place), width: 1.5, dash, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) }));
    addChart(run, title, series, [times.map((time) => time * scale), ...entries.map((entry) => held(entry.times, entry.values, times))], { unit, x, xText: (value) => `${figures(Number(value.toPrecision(4)))}` });
  };
  const fleets = shown.map((spans) => /** @type {FleetData} */ (spans.fleet)), several = shown.length > 1;
  const of = (/** @type {number} */ which, /** @type {string} */ text) => (several ? `${shown[which].header.name}${text ? `: ${text}` : ""}` : text);
  add("Jobs waiting after each round", fleets.map(({ rounds }, which) => ({ label: of(which, several ? "" : "waiting"), times: rounds.time, values: rounds.waiting, place: which })), figures);
  add("Devices that jobs hold", fleets.map((fleet, which) => ({ label: of(which, several ? "" : "devices"), ...devicesHeld(fleet), place: which })), figures);
  const millionth = (/** @type {Float64Array} */ values) => Array.from(values, (value) => value / MILLION);
  add("Utility of each round and its bound", fleets.flatMap(({ rounds }, which) => (rounds.bound.some((value) => value > 0)
    ? [{ label: of(which, "utility"), times: rounds.time, values: millionth(rounds.utility), place: 2 * which }, { label: of(which, "bound"), times: rounds.time, values: millionth(rounds.bound), place: 2 * which + 1, dash: [5, 4] }] : [])), figures);
  fleets.forEach(({ rounds, kinds }, which) => add(`Price of a device${several ? `: ${shown[which].header.name}` : ""}`, kinds.flatMap((kind, place) => (rounds.prices[place].length ? [{ label: kind, times: rounds.time, values: millionth(rounds.prices[place]), place }] : [])), figures));
  byId("run-section").hidden = !charts.length;
  byId("curves-section").hidden = true;
}

/** How many devices are held from when on. @param {FleetData} fleet */
function devicesHeld({ attempts }) {
  /** @type {Map<number, number>} */
  const changes = new Map([[0, 0]]);
  attempts.start.forEach((time, place) => changes.set(time, (changes.get(time) || 0) + attempts.devices[place]));
  attempts.end.forEach((time, place) => changes.set(time, (changes.get(time) || 0) - attempts.devices[place]));
  const times = [...changes.keys()].sort((one, other) => one - other);
  let sum = 0;
  return { times, values: times.map((time) => (sum += changes.get(time) || 0)) };
}

/** The table of jobs. @param {Report} report @param {Spans[]} shown @param {string} text of the search @param {(job: number) => void} choose */
function showJobs(report, shown, text, choose) {
  const fleets = shown.map((spans) => /** @type {FleetData} */ (spans.fleet)), [first] = fleets;
  const jct = (/** @type {FleetData} */ fleet, /** @type {number} */ place) => fleet.jobs.completion[place] - fleet.jobs.arrival[place];
  const orders = /** @type {{[name: string]: (place: number) => number}} */ ({
    wait: (place) => -first.jobs.wait[place], jct: (place) => -jct(first, place), arrival: (place) => first.jobs.arrival[place],
    reallocations: (place) => -first.jobs.reallocations[place], error: (place) => -estimateError(first, first.jobs.number[place]),
  });
  const places = Array.from(first.jobs.number.keys()).filter((place) => report.groups[first.jobs.number[place]].toLowerCase().includes(text));
  const by = orders[byId("job-order").value], keys = new Map(places.map((place) => [place, by(place)]));
  places.sort((one, other) => /** @type {number} */ (keys.get(one)) - /** @type {number} */ (keys.get(other)) || one - other);
  const rows = places.slice(0, MOST_JOBS).map((place) => {
    const job = first.jobs.number[place], button = element("button", report.groups[job], { type: "button" });
    button.addEventListener("click", () => choose(job));
    const error = estimateError(first, job);
    return [
      button, report.tasks[first.jobs.team[place]], timeText(first.jobs.arrival[place]),
      ...fleets.map((fleet) => { const other = fleet.place.get(job); return other === undefined ? "–" : timeText(jct(fleet, other)); }),
      timeText(first.jobs.wait[place]), figures(first.jobs.reallocations[place]), error >= 0 ? percent(error) : "–", first.header.phases[first.jobs.phase[place]],
    ];
  });
  const head = ["", "team", "arrives", ...fleets.map((_, which) => `completion time${fleets.length > 1 ? `, ${shown[which].header.name}` : ""}`), "longest wait", "reallocations", "estimates off by", "phase"];
  byId("jobs").replaceChildren(
    makeTable("", head, rows), element("p", places.length > MOST_JOBS ? `${(places.length - MOST_JOBS).toLocaleString("en")} more jobs; the search above the timeline finds them by name.` : places.length ? "" : "No job has such a name."),
  );
}

/** The mean error of the estimates of a job's attempts that were measured, -1 for none. @param {FleetData} fleet @param {number} job */
function estimateError(fleet, job) {
  let sum = 0, count = 0;
  for (const attempt of fleet.attemptsOf.get(job) || []) {
    const { estimated, step } = fleet.attempts;
    if (estimated[attempt] > 0 && step[attempt] > 0) { sum += Math.abs(step[attempt] / estimated[attempt] - 1); count++; }
  }
  return count ? sum / count : -1;
}

/** One job: its cells, attempts and waits, under each policy that is shown. @param {Report} report @param {Spans[]} shown @param {number} job */
function showJob(report, shown, job) {
  /** @type {Node[]} */
  const parts = [element("h3", `Job ${report.groups[job]}`)];
  for (const spans of shown) {
    const fleet = /** @type {FleetData} */ (spans.fleet), place = fleet.place.get(job), { attempts, header } = fleet;
    if (place === undefined) continue;
    const mine = fleet.attemptsOf.get(job) || [], waits = fleet.waitsOf.get(job) || [];
    const name = shown.length > 1 ? `${header.name}: ` : "";
    const waited = waits.reduce((sum, [, from, to]) => sum + to - from, 0);
    const arrival = fleet.jobs.arrival[place], completion = fleet.jobs.completion[place];
    parts.push(element("p", `${name}arrived at ${timeText(arrival)}, ${header.phases[fleet.jobs.phase[place]]} at ${timeText(completion)} (${timeText(completion - arrival)}); waited ${timeText(waited)} in all, ${mine.length} attempt${mine.length === 1 ? "" : "s"}.`));
    const cells = (header.cells[`${job}`] || []).map(([kind, devices, stages, seconds, grade]) => {
      const chosen = mine.filter((attempt) => attempts.kind[attempt] === kind && attempts.devices[attempt] === devices);
      const time = chosen.reduce((sum, attempt) => sum + attempts.end[attempt] - attempts.start[attempt], 0);
      return [
        `${chosen.length ? "● " : ""}${devices} x ${fleet.kinds[kind] || "?"}${stages > 1 ? `, ${stages} stages` : ""}`,
        grade < 0 ? "does not fit" : secondsText(seconds), grade < 0 ? "" : /** @type {string[]} */ (report.grades)[grade], chosen.length ? `${chosen.length} ×, ${timeText(time)}` : "",
      ];
    });
    if (cells.length) parts.push(makeTable(`${name}its cells; ● were chosen`, ["", "step", "grade", "chosen"], cells));
    parts.push(makeTable(`${name}its attempts${mine.length > MOST_LINES ? `, the first ${MOST_LINES}` : ""}`, ["", "from", "to", "starting", "step, estimated", "measured", "ratio", "rate of its best", "lost"], mine.slice(0, MOST_LINES).map((attempt) => {
      const estimated = attempts.estimated[attempt], step = attempts.step[attempt];
      return [
        `${attempts.number[attempt]}: ${cellText(fleet, attempt)}`, timeText(attempts.start[attempt]), timeText(attempts.end[attempt]), timeText(attempts.ready[attempt] - attempts.start[attempt]),
        estimated ? timeText(estimated) : "–", step ? timeText(step) : "–", estimated && step ? `${(step / estimated).toFixed(2)} ×` : "–", percent(attempts.rate[attempt] / MILLION), attempts.lost[attempt] ? timeText(attempts.lost[attempt]) : "",
      ];
    })));
    const why = element("ul");
    for (const [, from, to, reason] of waits.slice(0, MOST_LINES)) why.append(element("li", `${timeText(to - from)}, from ${timeText(from)} to ${timeText(to)}: ${header.reasons[reason] || "until the next round"}.`));
    parts.push(element("p", waits.length ? `${name}why it waited${waits.length > MOST_LINES ? `, the first ${MOST_LINES} of ${waits.length} times` : ""}:` : `${name}it never waited.`), ...(waits.length ? [why] : []));
  }
  byId("job").replaceChildren(...parts);
}
