// Unpacks the data: base64, gzip, one line of JSON, then columns (spindle.timeline.columns describes them).

/**
 * @param {string} text base64
 * @returns {Promise<{report: Report, columns: Map<string, Float64Array>}>}
 */
async function decodeData(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const content = new Uint8Array(await new Response(stream).arrayBuffer());
  const newline = content.indexOf(10);
  /** @type {Report} */
  const report = JSON.parse(new TextDecoder().decode(content.subarray(0, newline)));
  if (report.spindle !== "report" || report.version !== 2 || !["step", "fleet"].includes(report.kind)) {
    throw new Error(`this page shows version 2 of a report of steps or of a fleet, not version ${report.version} of ${report.kind}`);
  }
  const columns = new Map();
  let place = newline + 1;
  for (const [name, count, width] of report.columns) {
    columns.set(name, unpackColumn(content, place, count, width));
    place += count * width;
  }
  return { report, columns };
}

/**
 * Differences as unsigned numbers, all lowest bytes first; up to 2^53, which is 104 days in nanoseconds.
 * @param {Uint8Array} content @param {number} place @param {number} count @param {number} width
 */
function unpackColumn(content, place, count, width) {
  const values = new Float64Array(count);
  for (let plane = 0, factor = 1; plane < width; plane++, factor *= 256) {
    const from = place + plane * count;
    for (let index = 0; index < count; index++) values[index] += content[from + index] * factor;
  }
  let value = 0;
  for (let index = 0; index < count; index++) {
    const unsigned = values[index];
    value += unsigned % 2 ? -(unsigned + 1) / 2 : unsigned / 2;
    values[index] = value;
  }
  return values;
}

/** @param {Report} report @param {Map<string, Float64Array>} columns @param {number} number @returns {Spans} */
function makeSpans(report, columns, number) {
  const header = report.timelines[number];
  /** @param {string} name */
  const column = (name) => /** @type {Float64Array} */ (columns.get(`${number}.${name}`));
  const gap = column("gap"), duration = column("duration"), distance = column("after");
  const count = gap.length;
  const start = new Float64Array(count), end = new Float64Array(count), reach = new Float64Array(count);
  const rank = Int32Array.from(column("rank")), lane = Int32Array.from(column("lane"));
  const after = new Int32Array(count);
  /** @type {Row[][]} */
  const rows = Array.from({ length: header.numRanks }, () => []);
  let time = 0;
  for (let span = 0; span < count; span++) {
    start[span] = time + gap[span];
    time = end[span] = start[span] + duration[span];
    after[span] = distance[span] === 0 ? -1 : span - distance[span];
    const opens = span === 0 || rank[span] !== rank[span - 1] || lane[span] !== lane[span - 1];
    if (opens) rows[rank[span]].push({ lane: lane[span], from: span, to: span });
    rows[rank[span]][rows[rank[span]].length - 1].to = span + 1;
    reach[span] = opens ? end[span] : Math.max(reach[span - 1], end[span]);
  }
  const bytesAtStart = column("bytes_at_start"), bytesAtEnd = column("bytes_at_end");
  const staticBytes = column("static_bytes");
  return {
    header, program: report.programs[header.program], rank, lane, instruction: Int32Array.from(column("instruction")),
    start, end, waited: column("waited"), reach, after, bytesAtStart, bytesAtEnd, staticBytes, rows,
    hasMemory: staticBytes.some((bytes) => bytes > 0) || bytesAtStart.some((bytes) => bytes !== 0),
  };
}

/** Whether a lane runs slots: the first, and those behind transfers and synchronisation. @param {number} lane */
function isCompute(lane) {
  return lane === 0 || lane > 2;
}
