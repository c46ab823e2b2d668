// Paints rows into pixels. Everything is a loop over typed arrays: this runs for every frame.

const STRIPE = 6;  // pixels from one stripe to the next

/**
 * @param {Uint32Array} pixels @param {number} width @param {number} height in pixels of the device
 * @param {Layout} layout @param {number} scroll the first height that is shown @param {number} ratio pixels for each unit of layout
 * @param {number} from @param {number} to nanoseconds at the left and right
 * @param {(spans: Spans) => Palette} paletteOf @param {Theme} theme
 */
function paintRows(pixels, width, height, layout, scroll, ratio, from, to, paletteOf, theme) {
  pixels.fill(theme.after);
  const fill = new Uint32Array(width), stripe = new Uint32Array(width);
  const otherFill = new Uint32Array(width), otherStripe = new Uint32Array(width);
  for (const band of layout.bands) {
    const top = Math.max(0, Math.round((band.top - scroll) * ratio));
    const bottom = Math.min(height, Math.round((band.top + band.height - scroll) * ratio));
    if (bottom <= 0 || top >= height || bottom <= top) continue;
    if (band.kind === "memory") {
      paintMemory(pixels, width, top, bottom, Math.round((band.top + band.height - scroll) * ratio), band, ratio, from, to, theme);
      continue;
    }
    const striped = paintLine(fill, stripe, width, band.spans, band.from, band.to, from, to, paletteOf(band.spans), theme);
    if (band.other) {
      const { spans, from: first, to: last } = band.other;
      paintLine(otherFill, otherStripe, width, spans, first, last, from, to, paletteOf(spans), theme);
      blend(fill, otherFill);
      blend(stripe, otherStripe);
    }
    for (let y = top; y < bottom; y++) {
      const line = y * width;
      pixels.set(fill, line);
      if (striped) for (let x = (STRIPE - (y % STRIPE)) % STRIPE; x < width; x += STRIPE) pixels[line + x] = stripe[x];
    }
  }
}

/**
 * One line of pixels of a row. A span shorter than a pixel shows where nothing else does.
 * @param {Uint32Array} fill @param {Uint32Array} stripe @param {number} width
 * @param {Spans} spans @param {number} first @param {number} last @param {number} from @param {number} to
 * @param {Palette} palette @param {Theme} theme @returns {boolean} whether any of it is striped
 */
function paintLine(fill, stripe, width, spans, first, last, from, to, palette, theme) {
  const { start, end, instruction } = spans;
  const scale = width / (to - from), idle = theme.idle;
  const endOfStep = Math.max(0, Math.min(width, Math.round((spans.header.makespan - from) * scale)));
  fill.fill(idle, 0, endOfStep).fill(theme.after, endOfStep);
  stripe.set(fill);
  let striped = false;
  for (let span = firstReaching(spans, { lane: 0, from: first, to: last }, from); span < last && start[span] < to; span++) {
    const place = palette.bySpan ? span : instruction[span];
    const colour = palette.fill[place], second = palette.stripe[place];
    const begin = Math.max(0, Math.round((start[span] - from) * scale));
    let finish = Math.min(width, Math.round((end[span] - from) * scale));
    if (finish <= begin) {
      if (begin < width && fill[begin] === idle) finish = begin + 1;
      else continue;
    }
    striped ||= second !== colour;
    fill.fill(colour, begin, finish);
    stripe.fill(second, begin, finish);
    if (finish - begin > 3 && start[span] >= from) fill[begin] = stripe[begin] = edgeOf(colour);
  }
  return striped;
}

/** A darker edge tells neighbours of one colour apart. @param {number} pixel */
function edgeOf(pixel) {
  return (0xff000000 | ((pixel & 0xfefefe) >>> 1)) >>> 0;
}

/** The mean of two lines. @param {Uint32Array} line @param {Uint32Array} other */
function blend(line, other) {
  for (let x = 0; x < line.length; x++) {
    if (line[x] !== other[x]) line[x] = (0xff000000 | (((line[x] & 0xfefefe) >>> 1) + ((other[x] & 0xfefefe) >>> 1))) >>> 0;
  }
}

/** @type {WeakMap<Spans, Map<number, {times: Float64Array, live: Float64Array}>>} */
const memories = new WeakMap();

/** Times at which the live bytes of a device change, and the bytes from then on. @param {Spans} spans @param {number} rank */
function memoryOf(spans, rank) {
  let known = memories.get(spans);
  if (!known) memories.set(spans, known = new Map());
  let memory = known.get(rank);
  if (!memory) {
    /** @type {[number, number, number][]} */
    const changes = [];
    for (const row of spans.rows[rank]) {
      for (let span = row.from; span < row.to; span++) {
        // At equal times, memory is freed before it is allocated.
        if (spans.bytesAtStart[span]) changes.push([spans.start[span], 1, spans.bytesAtStart[span]]);
        if (spans.bytesAtEnd[span]) changes.push([spans.end[span], 0, spans.bytesAtEnd[span]]);
      }
    }
    changes.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
    const times = new Float64Array(changes.length + 1), live = new Float64Array(changes.length + 1);
    live[0] = spans.staticBytes[rank];
    changes.forEach(([time, , bytes], place) => {
      times[place + 1] = time;
      live[place + 1] = live[place] + bytes;
    });
    known.set(rank, memory = { times, live });
  }
  return memory;
}

/** The most bytes that any device of a timeline has. @param {Spans} spans */
function peakBytes(spans) {
  return spans.rows.reduce((most, _, rank) => Math.max(most, ...chunkedMax(memoryOf(spans, rank).live)), 0);
}

/** The most bytes that any device of a timeline has, or may have. @param {Spans} spans */
function memoryScale(spans) {
  const peak = peakBytes(spans);
  return Math.max(peak, spans.header.memoryLimit < 4 * peak ? spans.header.memoryLimit : 0, 1);
}

/** @param {Float64Array} values */
function chunkedMax(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return [most];
}

let mostBytes = 1;  // at the top of every band of memory

/** One scale for all timelines. @param {Spans[]} timelines */
function scaleMemory(timelines) {
  mostBytes = Math.max(1, ...timelines.filter((spans) => spans.hasMemory).map(memoryScale));
}

/**
 * @param {Uint32Array} pixels @param {number} width @param {number} top @param {number} bottom @param {number} base where the band ends, perhaps below
 * @param {Band} band @param {number} ratio @param {number} from @param {number} to @param {Theme} theme
 */
function paintMemory(pixels, width, top, bottom, base, band, ratio, from, to, theme) {
  const { times, live } = memoryOf(band.spans, band.rank);
  const most = mostBytes;
  const full = band.height * ratio, step = (to - from) / width;
  const colour = pixelOf("#009e73"), light = pixelOf("#7fceb9");
  let place = 0;
  for (let x = 0; x < width; x++) {
    const begin = from + x * step, finish = begin + step;
    if (begin > band.spans.header.makespan) break;
    while (place + 1 < times.length && times[place + 1] <= begin) place++;
    let bytes = live[place];
    for (let ahead = place + 1; ahead < times.length && times[ahead] < finish; ahead++) bytes = Math.max(bytes, live[ahead]);
    const edge = base - Math.round((bytes / most) * full);
    for (let y = Math.max(top, edge); y < bottom; y++) pixels[y * width + x] = y < edge + 2 ? colour : light;
  }
  if (band.spans.header.memoryLimit && band.spans.header.memoryLimit <= most) {
    const limit = base - Math.round((band.spans.header.memoryLimit / most) * full);
    if (limit >= top && limit < bottom) for (let x = 0; x < width; x += 6) pixels.fill(pixelOf("#d55e00"), limit * width + x, limit * width + Math.min(x + 3, width));
  }
}
