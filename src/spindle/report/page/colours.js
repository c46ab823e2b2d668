// Colours of spans. Modules and tasks have the colours of every other picture of Spindle; backward is darker and striped.

const KIND_COLOURS = { forward: 0, backward: 1, transfer: 2, sync: 3, gather: 4, optimizer: 5, training: 0, reallocation: 1, lost: 5, down: 3 };
const STRIPED = ["backward", "reallocation", "lost", "down"];
const NEUTRAL = { transfer: "#8d949f", sync: "#626975", gather: "#a89f91", optimizer: "#b3a7c4", down: "#6b5b66" };
const LONGER = "#d55e00", SHORTER = "#0072b2", SAME = "#a8adb6", UNMATCHED = "#cc79a7";
/** The colours of classes of time. @type {{[name: string]: string}} */
const CLASS_COLOURS = {
  forward: "#0072b2", backward: "#004c77", recompute: "#56b4e9", optimizer: "#cc79a7", transfer: "#e69f00",
  sync: "#d55e00", idle: "", training: "#0072b2", reallocation: "#e69f00", lost: "#d55e00", down: "#cc79a7",
};

/** @param {string} hex */
function channels(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

/** A pixel of an ImageData, read as 32 bits, little-endian. @param {string} hex */
function pixelOf(hex) {
  const [red, green, blue] = channels(hex);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** @param {string} hex @param {string} other @param {number} share of the other */
function mixed(hex, other, share) {
  const there = channels(other);
  return "#" + channels(hex).map((value, place) => Math.round(value * (1 - share) + there[place] * share).toString(16).padStart(2, "0")).join("");
}

/** Black or white, whichever reads better. @param {string} hex */
function inkOn(hex) {
  const [red, green, blue] = channels(hex).map((value) => {
    const channel = value / 255;
    return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
}

/** The colour of an instruction, before dimming. @param {Report} report @param {ReportProgram} program @param {number} number @param {string} by */
function colourOf(report, program, number, by) {
  const kind = report.kinds[program.kinds[number]];
  if (by === "kind") return report.colours[/** @type {any} */ (KIND_COLOURS)[kind]];
  const place = by === "task" ? program.tasks[number] : program.groups[number];
  if (place < 0) return /** @type {any} */ (NEUTRAL)[kind];
  const colour = report.colours[place % report.colours.length];
  return kind === "backward" || kind === "lost" ? darkened(colour) : colour;
}

/** What backward has of a forward's colour; black cannot get darker. @param {string} colour */
function darkened(colour) {
  const dark = channels(colour).every((value) => value < 60);
  return dark ? mixed(colour, "#ffffff", 0.25) : mixed(colour, "#000000", 0.3);
}

/**
 * Fill and stripes by instruction; stripes equal the fill where there are none.
 * @param {Report} report @param {Spans} spans @param {string} by @param {boolean[] | null} matching others are dimmed
 * @param {string} background @returns {Palette}
 */
function makePalette(report, spans, by, matching, background) {
  const count = spans.program.names.length;
  const fill = new Uint32Array(count), stripe = new Uint32Array(count);
  for (let number = 0; number < count; number++) {
    let colour = colourOf(report, spans.program, number, by);
    const striped = STRIPED.includes(report.kinds[spans.program.kinds[number]]);
    let second = striped ? mixed(colour, "#ffffff", 0.45) : colour;
    if (matching && !matching[number]) {
      colour = mixed(colour, background, 0.82);
      second = mixed(second, background, 0.82);
    }
    fill[number] = pixelOf(colour);
    stripe[number] = pixelOf(second);
  }
  return { fill, stripe, bySpan: false };
}

/** Palette by span: those of a set stay, others are dimmed. @param {Spans} spans @param {Palette} palette @param {Set<number>} chosen @param {string} background @returns {Palette} */
function dimmedPalette(spans, palette, chosen, background) {
  const fill = new Uint32Array(spans.start.length), stripe = new Uint32Array(spans.start.length);
  const far = channels(background);
  /** @param {number} pixel */
  const dim = (pixel) => {
    const parts = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255].map((value, place) => Math.round(value * 0.18 + far[place] * 0.82));
    return ((255 << 24) | (parts[2] << 16) | (parts[1] << 8) | parts[0]) >>> 0;
  };
  const dimFill = palette.fill.map(dim), dimStripe = palette.stripe.map(dim);
  for (let span = 0; span < fill.length; span++) {
    const place = palette.bySpan ? span : spans.instruction[span];
    const stays = chosen.has(span);
    fill[span] = stays ? palette.fill[place] : dimFill[place];
    stripe[span] = stays ? palette.stripe[place] : dimStripe[place];
  }
  return { fill, stripe, bySpan: true };
}

/** Palette by span: longer, shorter or as long as its match. @param {Spans} spans @param {Spans} other @param {Int32Array} match @returns {Palette} */
function differencePalette(spans, other, match) {
  const fill = new Uint32Array(spans.start.length);
  const [longer, shorter, same, unmatched] = [LONGER, SHORTER, SAME, UNMATCHED].map(pixelOf);
  const light = [LONGER, SHORTER].map((colour) => pixelOf(mixed(colour, "#ffffff", 0.55)));
  for (let span = 0; span < fill.length; span++) {
    if (match[span] < 0) { fill[span] = unmatched; continue; }
    const ours = spans.end[span] - spans.start[span], theirs = other.end[match[span]] - other.start[match[span]];
    const ratio = theirs > 0 ? ours / theirs : ours > 0 ? Infinity : 1;
    if (ratio > 1.02) fill[span] = ratio > 1.1 ? longer : light[0];
    else if (ratio < 0.98) fill[span] = ratio < 0.9 ? shorter : light[1];
    else fill[span] = same;
  }
  return { fill, stripe: fill, bySpan: true };
}
