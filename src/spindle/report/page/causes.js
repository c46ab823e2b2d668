// Why is a device idle? Follows what spans waited for (spindle.report.causes).

/**
 * Spans from the first to the one that ends last, each waiting for the one before it.
 * @param {Spans} spans @returns {number[]}
 */
function criticalPath(spans) {
  let last = -1;
  for (let span = 0; span < spans.end.length; span++) if (last < 0 || spans.end[span] > spans.end[last]) last = span;
  const path = [];
  for (let span = last; span >= 0 && path.length <= spans.end.length; span = spans.after[span]) path.push(span);
  return path.reverse();
}

/**
 * Nanoseconds along the critical path by kind, and what lies between its spans: latency, launches, contention.
 * @param {Report} report @param {Spans} spans
 */
function criticalTimes(report, spans) {
  const path = criticalPath(spans), times = report.kinds.map(() => 0);
  for (const span of path) times[spans.program.kinds[spans.instruction[span]]] += spans.end[span] - spans.start[span];
  return { count: path.length, times, between: Math.max(0, spans.header.makespan - times.reduce((one, other) => one + other, 0)) };
}

/**
 * The time around `time` in which no compute lane of a device is busy, with the span that ends it (-1: none).
 * @param {Spans} spans @param {number} rank @param {number} time
 */
function gapAt(spans, rank, time) {
  let from = 0, to = spans.header.makespan, next = -1;
  for (const row of spans.rows[rank]) {
    if (!isCompute(row.lane)) continue;
    const before = lastBegun(spans, row, time);
    if (before >= row.from) from = Math.max(from, spans.reach[before]);
    if (before + 1 < row.to && (next < 0 || spans.start[before + 1] < spans.start[next])) next = before + 1;
  }
  if (next >= 0) to = Math.min(to, spans.start[next]);
  return from <= time && time < to ? { rank, from, to, next } : null;
}

/**
 * What the span behind a gap waited for, back to the one that had begun before the gap: that made it late.
 * @param {Spans} spans @param {{from: number, next: number}} gap
 */
function causesOfGap(spans, gap) {
  const chain = [];
  for (let span = gap.next < 0 ? -1 : spans.after[gap.next]; span >= 0; span = spans.after[span]) {
    if (spans.end[span] <= gap.from) break;  // it was done when the gap began
    chain.push(span);
    if (spans.start[span] <= gap.from || chain.length > 1000) break;
  }
  return chain;
}
