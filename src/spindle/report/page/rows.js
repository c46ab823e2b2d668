// Which rows stand where: devices, folded where they are equal, each with its lanes and its memory.

/** @typedef {{mode: string, fold: string, height: number, memory: boolean}} LayoutOptions */

/**
 * @param {Spans} first @param {Spans | null} second @param {LayoutOptions} options
 * @returns {Layout}
 */
function makeLayout(first, second, options) {
  const layout = { bands: /** @type {Band[]} */ ([]), blocks: /** @type {Block[]} */ ([]), titles: /** @type {{top: number, text: string}[]} */ ([]), height: 4 };
  const mode = second ? options.mode : "single";
  if (mode === "stacked") {
    for (const spans of /** @type {Spans[]} */ ([first, second])) {
      if (spans.fleet) layout.titles.push({ top: layout.height, text: spans.header.name });
      layout.height += spans.fleet ? 18 : 0;
      for (const ranks of foldedRanks([spans], options.fold)) addBlock(layout, spans, ranks, null, options, spans.header.name);
      layout.height += 10;
    }
    return layout;
  }
  const shown = second ? [first, second] : [first];
  for (const ranks of foldedRanks(shown, options.fold)) {
    if (ranks[0] < first.rows.length) {
      addBlock(layout, first, ranks, mode === "overlaid" ? second : null, options, mode === "pairs" ? first.header.name : "");
    }
    if (mode === "pairs" && second && ranks[0] < second.rows.length) {
      addBlock(layout, second, ranks, null, options, second.header.name);
      layout.height += 4;
    }
  }
  return layout;
}

/** @param {Layout} layout @param {Spans} spans @param {number[]} ranks @param {Spans | null} other @param {LayoutOptions} options @param {string} name */
function addBlock(layout, spans, ranks, other, options, name) {
  const rank = ranks[0], top = layout.height;
  const thin = Math.max(3, Math.round(options.height / 3.5));
  for (const row of spans.rows[rank]) {
    const height = isCompute(row.lane) ? options.height : thin;
    const beside = other && rank < other.rows.length ? other.rows[rank].find((candidate) => candidate.lane === row.lane) : null;
    layout.bands.push({
      top: layout.height, height, kind: isCompute(row.lane) ? "compute" : "communication", spans, rank, from: row.from, to: row.to,
      other: other && beside ? { spans: other, from: beside.from, to: beside.to } : null,
    });
    layout.height += height + (options.height > 8 ? 1 : 0);
  }
  if (options.memory && spans.hasMemory) {
    const height = Math.max(8, Math.round(options.height * 0.9));
    layout.bands.push({ top: layout.height, height, kind: "memory", spans, rank, from: 0, to: 0, other: null });
    layout.height += height + 1;
  }
  layout.blocks.push({ top, height: layout.height - top, label: `${rowLabel(spans, ranks)}${name && !spans.fleet ? ` ${name}` : ""}`, ranks, spans });
  layout.height += options.height > 8 ? 3 : options.height > 3 ? 1 : 0;
}

/**
 * Ranks in groups: each alone; those whose spans have equal times; or those that run the same instructions.
 * @param {Spans[]} timelines @param {string} fold @returns {number[][]}
 */
function foldedRanks(timelines, fold) {
  const count = Math.max(...timelines.map((spans) => spans.rows.length));
  if (fold === "all") return Array.from({ length: count }, (_, rank) => [rank]);
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  for (let rank = 0; rank < count; rank++) {
    const key = timelines.map((spans) => keyOfRank(spans, rank, fold === "times")).join("|");
    const group = groups.get(key);
    if (group) group.push(rank);
    else groups.set(key, [rank]);
  }
  return [...groups.values()];
}

/** Equal for devices with equal rows; 53 bits of a hash of each row. @param {Spans} spans @param {number} rank @param {boolean} withTimes */
function keyOfRank(spans, rank, withTimes) {
  if (rank >= spans.rows.length) return "";
  return spans.rows[rank].map((row) => {
    let low = row.lane + 1, high = row.to - row.from;
    for (let span = row.from; span < row.to; span++) {
      low = Math.imul(low ^ spans.instruction[span], 0x9e3779b1);
      if (withTimes) {
        low = Math.imul(low ^ (spans.start[span] % 0x7fffffff), 0x85ebca6b);
        high = Math.imul(high ^ (spans.end[span] % 0x7ffffffd), 0xc2b2ae35);
      }
      high = Math.imul(high ^ (low >>> 15), 0x27d4eb2f);
    }
    return `${row.lane}:${low}:${high}`;
  }).join(",");
}

/** `0-3,8`. @param {number[]} numbers */
function rangesOf(numbers) {
  const parts = [];
  for (let index = 0; index < numbers.length; index++) {
    const first = index;
    while (index + 1 < numbers.length && numbers[index + 1] === numbers[index] + 1) index++;
    parts.push(index > first ? `${numbers[first]}-${numbers[index]}` : `${numbers[first]}`);
  }
  return parts.length > 4 ? `${parts.slice(0, 3).join(",")},… (${numbers.length})` : parts.join(",");
}
