// Where the time of devices went, as spindle.report.sums computes it for a whole step.

/**
 * Nanoseconds of one device by class in [from, to), of which idle is the last.
 * @param {Report} report @param {Spans} spans @param {number} rank @param {number} from @param {number} to
 */
function deviceSums(report, spans, rank, from, to) {
  const { program, start, end, instruction } = spans;
  const classes = report.classes;
  to = Math.min(to, spans.header.makespan);  // behind its end, a step is not idle but over
  from = Math.min(from, to);
  /** @type {[number, number][][]} */
  const pieces = classes.map(() => []);
  const recompute = classes.indexOf("recompute");
  const classOf = report.kinds.map((kind) => classes.indexOf(kind === "gather" ? "sync" : kind));
  for (const row of spans.rows[rank]) {
    for (let span = firstReaching(spans, row, from); span < row.to && start[span] < to; span++) {
      const number = instruction[span];
      const middle = start[span] + Math.floor((end[span] - start[span]) * program.recompute[number]);
      if (recompute >= 0) add(pieces[recompute], start[span], middle);
      add(pieces[classOf[program.kinds[number]]], middle, end[span]);
    }
  }
  /** @param {[number, number][]} list @param {number} begin @param {number} finish */
  function add(list, begin, finish) {
    const clipped = Math.max(begin, from), clippedEnd = Math.min(finish, to);
    if (clippedEnd > clipped) list.push([clipped, clippedEnd]);
  }
  const sums = classes.map(() => 0);
  /** @type {[number, number][]} */
  let covered = [];
  let coveredTime = 0;
  for (let number = 0; number < classes.length - 1; number++) {
    if (!pieces[number].length) continue;
    covered = union(covered.concat(pieces[number]));
    const time = covered.reduce((sum, [begin, finish]) => sum + finish - begin, 0);
    sums[number] = time - coveredTime;
    coveredTime = time;
  }
  sums[classes.length - 1] = to - from - coveredTime;
  return sums;
}

/** Disjoint and sorted intervals that cover the same. @param {[number, number][]} intervals */
function union(intervals) {
  intervals.sort((one, other) => one[0] - other[0]);
  /** @type {[number, number][]} */
  const result = [];
  for (const [begin, finish] of intervals) {
    const last = result[result.length - 1];
    if (last && begin <= last[1]) last[1] = Math.max(last[1], finish);
    else result.push([begin, finish]);
  }
  return result;
}

/** The first span of a row that has not ended by a time. @param {Spans} spans @param {Row} row @param {number} time */
function firstReaching(spans, row, time) {
  let low = row.from, high = row.to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.reach[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The last span of a row that has begun by a time, or row.from - 1. @param {Spans} spans @param {Row} row @param {number} time */
function lastBegun(spans, row, time) {
  let low = row.from, high = row.to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.start[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The span of a row that runs at a time, or -1. @param {Spans} spans @param {Row} row @param {number} time */
function spanAt(spans, row, time) {
  for (let span = lastBegun(spans, row, time); span >= row.from && spans.reach[span] > time; span--) {
    if (spans.end[span] > time) return span;
  }
  return -1;
}
