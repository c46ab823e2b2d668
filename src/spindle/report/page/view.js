// The timeline's view: what is shown, and what mouse and keyboard do.

const GUTTER = 150, AXIS = 26;  // pixels beside and above the rows

/**
 * @typedef {object} State
 * @property {number} from @property {number} to nanoseconds at the left and the right
 * @property {[number, number] | null} range
 * @property {{spans: Spans, span: number} | null} selected
 * @property {{spans: Spans, rank: number, from: number, to: number, next: number} | null} gap
 * @property {number} row position of the band that the keyboard is at
 */

/** Unpack the data and show it. */
async function start() {
  try {
    const { report, columns } = await decodeData(byId("data").textContent.trim());
    byId("data").remove();
    unitSeconds = report.unit;
    const make = report.kind === "fleet" ? makeFleetSpans : makeSpans;
    show(report, report.timelines.map((_, number) => make(report, columns, number)));
  } catch (error) {
    byId("subtitle").textContent = `This report cannot be read: ${error instanceof Error ? error.message : error}`;
  }
}

/** @param {Report} report @param {Spans[]} timelines */
function show(report, timelines) {
  const overlay = /** @type {HTMLCanvasElement} */ (byId("overlay")), canvas = /** @type {HTMLCanvasElement} */ (byId("pixels"));
  const scroller = /** @type {HTMLElement} */ (byId("scroll"));
  // Pixels are written by us for every frame, so this canvas stays in the memory of the host.
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { alpha: false, willReadFrequently: true }));
  const above = /** @type {CanvasRenderingContext2D} */ (overlay.getContext("2d"));
  /** @type {State} */
  const state = { from: 0, to: 1, range: null, selected: null, gap: null, row: 0 };
  /** @type {Layout} */
  let layout = { bands: [], blocks: [], titles: [], height: 0 };
  const ofFleet = report.kind === "fleet";
  const closest = ofFleet ? 1 / report.unit : 20;  // at most a second of a fleet, 20 ns of a step, fill the width
  let chosenJob = -1;
  /** @type {Map<Spans, Palette>} */
  let palettes = new Map();
  /** @type {Map<Spans, boolean[]>} */
  let matching = new Map();
  /** @type {{spans: Spans, span: number}[]} */
  let hits = [];
  let hit = -1;
  /** @type {Int32Array | null} */
  let match = null;
  let first = timelines[0];
  /** @type {Spans | null} */
  let second = timelines[1] || null;
  /** @type {ImageData} */
  let image = new ImageData(1, 1);
  let width = 0, height = 0, ratio = 1;
  /** @type {Theme} */
  let theme = readTheme();
  let pending = 0;
  let scrolled = 0;  // as of the last frame: the browser lays out the page for whoever asks

  // What is shown.

  function shownTimelines() {
    return second ? [first, second] : [first];
  }
  function longest() {
    return Math.max(1, ...shownTimelines().map((spans) => spans.header.makespan));
  }
  function readTheme() {
    return {
      idle: pixelOf(style("idle")), after: pixelOf(style("after")), text: style("label"), quiet: style("quiet"), line: style("line"),
      accent: style("accent"), background: style("background"),
    };
  }
  /** @param {string} id */
  const chosen = (id) => byId(id).value;

  /** New timelines, rows or devices. */
  function relayout() {
    first = timelines[Number(chosen("first"))];
    second = chosen("second") === "" ? null : timelines[Number(chosen("second"))];
    document.body.classList.toggle("single", timelines.length < 2);
    if (!second && chosen("colour") === "difference") byId("colour").value = "module";
    match = second && !ofFleet ? matchSpans(first, second) : null;
    layout = makeLayout(first, second, { mode: chosen("layout"), fold: chosen("fold"), height: rowHeight(), memory: byId("memory").checked });
    if (byId("memory").checked) scaleMemory(timelines);
    state.row = Math.min(state.row, layout.bands.length - 1);
    if (state.selected && !shownTimelines().includes(state.selected.spans)) state.selected = null;
    resize();
    recolour();
    byId("comparison-section").hidden = !second;
  }

  /** The height of a row; `fit`: so that all devices are seen at once, but for a pixel each. */
  function rowHeight() {
    if (chosen("height") !== "fit") return Number(chosen("height"));
    const shown = shownTimelines(), count = foldedRanks(shown, chosen("fold")).length * shown.length;
    return Math.max(1, Math.min(18, Math.floor((window.innerHeight * 0.66 - AXIS - 50) / count)));
  }

  /** The tables below the timeline. */
  function updateTables() {
    if (ofFleet) {
      if (second) showFleetComparison(report, first, second);
      updateJobs();
      drawFleetCharts(report, shownTimelines());
    }
    if (second && match) showComparison(report, first, second, match);
    showSums(report, shownTimelines(), state.range);
  }

  function updateJobs() {
    showJobs(report, shownTimelines(), chosen("search").trim().toLowerCase(), chooseJob);
    if (chosenJob >= 0) showJob(report, shownTimelines(), chosenJob);
  }
  /** Show a job, and where it runs first. @param {number} job */
  function chooseJob(job) {
    chosenJob = job;
    showJob(report, shownTimelines(), job);
    for (const spans of shownTimelines()) {
      let earliest = -1;
      for (let span = 0; span < spans.start.length; span++) {
        if (spans.program.groups[spans.instruction[span]] === job && (earliest < 0 || spans.start[span] < spans.start[earliest])) earliest = span;
      }
      if (earliest >= 0) { select(spans, earliest); break; }
    }
  }

  /** New colours: other ones, a search, the critical path, light or dark. */
  function recolour() {
    theme = readTheme();
    const by = chosen("colour"), text = chosen("search").trim().toLowerCase();
    palettes = new Map();
    matching = new Map();
    hits = [];
    hit = -1;
    shownTimelines().forEach((spans, which) => {
      const found = text ? spans.program.names.map((name) => name.toLowerCase().includes(text)) : null;
      if (found) {
        matching.set(spans, found);
        for (let span = 0; span < spans.start.length; span++) if (found[spans.instruction[span]]) hits.push({ spans, span });
      }
      const other = which ? first : second;
      let palette = makePalette(report, spans, by, found, style("idle"));
      if (by === "difference" && other && second && match) {
        palette = differencePalette(spans, other, which ? matchSpans(spans, other) : match);
      }
      if (byId("critical").checked) palette = dimmedPalette(spans, palette, new Set(criticalPath(spans)), style("idle"));
      palettes.set(spans, palette);
    });
    byId("hits").textContent = text ? `${hits.length.toLocaleString("en")} spans` : "";
    showLegend(report, by, second !== null);
    repaint();
  }

  function resize() {
    ratio = window.devicePixelRatio || 1;
    byId("spacer").style.height = `${layout.height + AXIS}px`;
    width = Math.max(200, scroller.clientWidth);
    const most = matchMedia("print").matches ? 2200 : Math.max(160, Math.floor(window.innerHeight * 0.66));
    height = Math.min(layout.height + AXIS, most);
    byId("stage").style.height = `${height}px`;
    if (matchMedia("print").matches) byId("spacer").style.height = `${height}px`;  // paper does not scroll
    for (const each of [canvas, overlay]) {
      each.width = Math.round(width * ratio);
      each.height = Math.round(height * ratio);
      each.style.width = `${width}px`;
      each.style.height = `${height}px`;
    }
    const columns = Math.max(1, Math.round((width - GUTTER) * ratio)), lines = Math.max(1, Math.round((height - AXIS) * ratio));
    image = new ImageData(columns, lines);
    repaint();
  }

  function repaint() {
    if (!pending) pending = requestAnimationFrame(() => { pending = 0; paint(); });
  }

  /** Paint a frame. */
  function paint() {
    const pixels = new Uint32Array(image.data.buffer);
    scrolled = scroller.scrollTop;
    paintRows(pixels, image.width, image.height, layout, scrolled, ratio, state.from, state.to, (spans) => /** @type {Palette} */ (palettes.get(spans)), theme);
    context.fillStyle = theme.background;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.putImageData(image, Math.round(GUTTER * ratio), Math.round(AXIS * ratio));
    paintOverlay();
  }

  // Above the pixels: axis, labels, lines, the selection.

  /** @param {number} time */
  const xOf = (time) => GUTTER + ((time - state.from) / (state.to - state.from)) * (width - GUTTER);
  /** @param {number} x */
  const timeOf = (x) => state.from + ((x - GUTTER) / (width - GUTTER)) * (state.to - state.from);
  /** @param {number} top */
  const yOf = (top) => AXIS + top - scrolled;

  function paintOverlay() {
    const onPaper = matchMedia("print").matches;
    if (onPaper) overlay.width = overlay.width;  // on paper, a cleared rectangle is white and hides what is below
    above.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (!onPaper) above.clearRect(0, 0, width, height);
    above.font = "12px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif";
    above.textBaseline = "middle";
    above.save();
    above.beginPath();
    above.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    above.clip();
    paintLabels();
    if (state.range) {
      above.fillStyle = theme.accent;
      above.globalAlpha = 0.16;
      above.fillRect(xOf(state.range[0]), AXIS, xOf(state.range[1]) - xOf(state.range[0]), height);
      above.globalAlpha = 1;
    }
    paintCauses();
    paintLines();
    above.restore();
    paintGutter();
    paintAxis();
  }

  /** Names in spans that are wide enough. */
  function paintLabels() {
    const by = chosen("colour");
    let left = 300;
    for (const band of layout.bands) {
      const top = yOf(band.top);
      if (band.kind !== "compute" || band.height < 12 || top > height || top + band.height < AXIS) continue;
      const { spans } = band;
      for (let span = firstReaching(spans, { lane: 0, from: band.from, to: band.to }, state.from); span < band.to && spans.start[span] < state.to && left > 0; span++) {
        const begin = Math.max(GUTTER, xOf(spans.start[span])), wide = Math.min(width, xOf(spans.end[span])) - begin;
        if (wide < 34) continue;
        const number = spans.instruction[span], group = spans.program.groups[number];
        const name = group >= 0 ? report.groups[group] : spans.program.names[number];
        const fits = Math.floor((wide - 6) / 6.6);
        if (fits < 3) continue;
        const found = matching.get(spans);
        if ((found && !found[number]) || by === "difference" || byId("critical").checked) continue;
        above.fillStyle = inkOn(colourOf(report, spans.program, number, by));
        above.fillText(name.length > fits ? `${name.slice(0, fits - 1)}…` : name, begin + 4, top + band.height / 2 + 0.5);
        left--;
      }
    }
  }

  /** Arrows from what the selected span or gap waited for. */
  function paintCauses() {
    const { selected, gap } = state;
    if (gap) outline(gap.spans, gap.rank, gap.from, gap.to, true);
    if (selected) outline(selected.spans, selected.spans.rank[selected.span], selected.spans.start[selected.span], selected.spans.end[selected.span], false, selected.spans.lane[selected.span]);
    const spans = gap ? gap.spans : selected ? selected.spans : null;
    if (!spans) return;
    const chain = gap ? [gap.next, ...causesOfGap(spans, gap)] : selected ? [selected.span, spans.after[selected.span]] : [];
    above.strokeStyle = above.fillStyle = theme.accent;
    above.lineWidth = 1.5;
    for (let place = 0; place + 1 < chain.length; place++) {
      const [to, from] = [chain[place], chain[place + 1]];
      if (from < 0 || to < 0) continue;
      const [x1, y1] = pointOf(spans, from, spans.end[from]), [x2, y2] = pointOf(spans, to, spans.start[to]);
      above.beginPath();
      above.moveTo(x1, y1);
      above.bezierCurveTo(x1 + 18, y1, x2 - 18, y2, x2, y2);
      above.stroke();
      above.beginPath();
      above.arc(x2, y2, 3, 0, 7);
      above.fill();
    }
  }

  /** @param {Spans} spans @param {number} rank @param {number} lane */
  function bandOf(spans, rank, lane) {
    const block = layout.blocks.find((each) => each.spans === spans && each.ranks.includes(rank)) || layout.blocks.find((each) => each.ranks.includes(rank));
    const shown = block ? block.ranks[0] : rank;
    const bands = layout.bands.filter((band) => band.rank === shown && band.kind !== "memory" && (band.spans === spans || (band.other && band.other.spans === spans)));
    return bands.find((band) => spans.lane[band.spans === spans ? band.from : (band.other || band).from] === lane) || bands[0];
  }
  /** @param {Spans} spans @param {number} span @param {number} time @returns {[number, number]} */
  function pointOf(spans, span, time) {
    const band = bandOf(spans, spans.rank[span], spans.lane[span]);
    return [xOf(time), band ? yOf(band.top + band.height / 2) : AXIS];
  }
  /** @param {Spans} spans @param {number} rank @param {number} from @param {number} to @param {boolean} dashed @param {number} [lane] */
  function outline(spans, rank, from, to, dashed, lane) {
    const band = bandOf(spans, rank, lane || 0);
    if (!band) return;
    above.strokeStyle = theme.accent;
    above.lineWidth = 2;
    above.setLineDash(dashed ? [4, 3] : []);
    above.strokeRect(xOf(from), yOf(band.top) - 1, Math.max(2, xOf(to) - xOf(from)), band.height + 2);
    above.setLineDash([]);
  }

  /** The bound, and where steps end. */
  function paintLines() {
    const bounds = new Map(shownTimelines().filter((spans) => spans.header.bound > 0).map((spans) => [spans.header.bound, "bound"]));
    above.font = "11px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif";
    for (const [time, name] of bounds) {
      const x = xOf(time);
      if (x < GUTTER - 1 || x > width) continue;
      above.strokeStyle = above.fillStyle = theme.text;
      above.setLineDash([6, 4]);
      above.lineWidth = 1.5;
      above.beginPath();
      above.moveTo(x, AXIS);
      above.lineTo(x, height);
      above.stroke();
      above.setLineDash([]);
      above.save();
      const text = `${name} ${timeText(time)}`, wide = above.measureText(text).width + 6;
      const left = Math.max(GUTTER, Math.min(width - wide, x + 2));
      above.fillStyle = theme.background;
      above.globalAlpha = 0.85;
      above.fillRect(left, height - 16, wide, 15);
      above.restore();
      above.fillStyle = theme.text;
      above.fillText(text, left + 3, height - 8);
    }
  }

  function paintGutter() {
    above.fillStyle = theme.background;
    above.fillRect(0, AXIS, GUTTER, height - AXIS);
    above.save();
    above.beginPath();
    above.rect(0, AXIS, GUTTER - 6, height - AXIS);
    above.clip();
    above.font = "12px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif";
    let free = -Infinity;
    for (const block of layout.blocks) {
      const y = Math.max(yOf(block.top) + 8, Math.min(AXIS + 8, yOf(block.top + block.height) - 8));
      if (yOf(block.top + block.height) < AXIS || y > height || y < free) continue;
      above.fillStyle = theme.text;
      above.fillText(block.label, 6, y);
      if (block.label) free = y + 12;
    }
    above.restore();
    above.save();
    above.font = "bold 12px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif";
    for (const { top, text } of layout.titles) {
      const y = yOf(top) + 9;
      if (y < AXIS || y > height) continue;
      above.fillStyle = theme.text;
      above.fillText(text, 6, y);
    }
    above.restore();
    const band = layout.bands[state.row];
    if (band && document.activeElement === overlay) {
      above.fillStyle = theme.accent;
      above.fillRect(0, yOf(band.top), 3, band.height);
    }
  }

  function paintAxis() {
    above.fillStyle = theme.background;
    above.fillRect(0, 0, width, AXIS);
    above.fillStyle = theme.quiet;
    above.strokeStyle = theme.line;
    above.lineWidth = 1;
    above.font = "11px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif";
    above.fillText("device", 6, AXIS / 2);
    const least = (state.to - state.from) / Math.max(2, (width - GUTTER) / 110);
    const step = niceStep(least * unitSeconds) / unitSeconds;
    for (let number = Math.ceil(state.from / step); number * step <= state.to; number++) {
      const x = xOf(number * step);
      above.beginPath();
      above.moveTo(x, AXIS - 6);
      above.lineTo(x, AXIS);
      above.stroke();
      const text = timeText(Math.round(number * step)), wide = above.measureText(text).width;
      above.fillText(text, Math.min(x + 3, width - wide - 2), AXIS / 2);
    }
  }

  // Where one is.

  /** @param {number} x @param {number} y of the overlay */
  function pick(x, y) {
    if (x < GUTTER || y < AXIS) return null;
    const top = y - AXIS + scroller.scrollTop, time = timeOf(x);
    let low = 0, high = layout.bands.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (layout.bands[middle].top <= top) low = middle + 1;
      else high = middle;
    }
    const row = low - 1, band = layout.bands[row];
    if (!band || top >= band.top + band.height) return null;
    if (band.kind === "memory") return { row, band, time, spans: band.spans, span: -1 };
    let span = spanAt(band.spans, { lane: 0, from: band.from, to: band.to }, time);
    // In whole pixels, as it is painted.
    const near = (state.to - state.from) / (width - GUTTER) / 2;
    if (span < 0) span = spanAt(band.spans, { lane: 0, from: band.from, to: band.to }, time + near);
    return { row, band, time, spans: band.spans, span };
  }

  /** @param {number} from @param {number} to */
  function zoomTo(from, to) {
    const all = longest(), size = Math.min(Math.max(to - from, closest), all * 1.04);
    const middle = (from + to) / 2;
    state.from = Math.min(Math.max(middle - size / 2, -0.02 * all), Math.max(-0.02 * all, all * 1.02 - size));
    if (size >= all * 1.02) state.from = 0;
    state.to = state.from + Math.min(size, size >= all * 1.02 ? all * 1.02 : size);
    repaint();
  }
  function zoomOut() {
    zoomTo(0, longest() * 1.02);
  }
  /** @param {number} factor @param {number} at nanoseconds that stay where they are */
  function zoomBy(factor, at) {
    zoomTo(at - (at - state.from) * factor, at + (state.to - at) * factor);
  }
  /** @param {number} time */
  function move(time) {
    zoomTo(state.from + time, state.to + time);
  }
  /** @param {Spans} spans @param {number} span */
  function zoomToSpan(spans, span) {
    const size = Math.max(closest, spans.end[span] - spans.start[span]);
    zoomTo(spans.start[span] - size * 0.3, spans.end[span] + size * 0.3);
    const band = bandOf(spans, spans.rank[span], spans.lane[span]);
    if (band) reveal(band);
  }
  /** Scroll a band into view. @param {Band} band */
  function reveal(band) {
    const space = height - AXIS;
    if (band.top < scroller.scrollTop) scroller.scrollTop = Math.max(0, band.top - 8);
    else if (band.top + band.height > scroller.scrollTop + space) scroller.scrollTop = band.top + band.height - space + 8;
  }

  // What is selected.

  /** @param {Spans} spans @param {number} span */
  function select(spans, span) {
    state.selected = { spans, span };
    state.gap = null;
    const band = bandOf(spans, spans.rank[span], spans.lane[span]);
    if (band) state.row = layout.bands.indexOf(band);
    const details = byId("details"), [name, ...rest] = textOf(spans, span);
    const lines = [element("strong", name), ...rest.map((text) => element("p", text))];
    if (spans.fleet) {
      const job = spans.program.groups[spans.instruction[span]];
      if (job >= 0 && job !== chosenJob) { chosenJob = job; showJob(report, shownTimelines(), job); }
      details.replaceChildren(...lines, ...(job >= 0 ? [element("p", "Its cells, attempts and waits stand below, under Jobs.")] : []));
      repaint();
      return;
    }
    const cause = spans.after[span];
    if (cause >= 0) {
      const line = element("p", "It waited last for ");
      line.append(link(spans, cause), ` (device ${spans.rank[cause]}), which ended at ${timeText(spans.end[cause])}.`);
      lines.push(line);
    } else lines.push(element("p", "It waited for nothing."));
    const other = counterpart(spans, span);
    if (other) {
      const before = spans.end[span] - spans.start[span], now = other.spans.end[other.span] - other.spans.start[other.span];
      lines.push(element("p", `In ${other.spans.header.name}: ${timeText(now)}, from ${timeText(other.spans.start[other.span])}${before > 0 ? `; ${(now / before).toFixed(2)} × as long` : ""}.`));
    } else if (second) lines.push(element("p", "It has no counterpart in the other timeline."));
    details.replaceChildren(...lines);
    repaint();
  }

  /** @param {Spans} spans @param {number} span */
  function textOf(spans, span) {
    return spans.fleet ? fleetSpanText(report, spans, span) : spanText(spans, span);
  }
  /** @param {Spans} spans @param {number} span */
  function counterpart(spans, span) {
    if (!second || !match) return null;
    if (spans === first) return match[span] >= 0 ? { spans: second, span: match[span] } : null;
    const place = match.indexOf(span);
    return place >= 0 ? { spans: first, span: place } : null;
  }

  /** @param {Spans} spans @param {number} span */
  function link(spans, span) {
    const button = element("button", spans.program.names[spans.instruction[span]], { type: "button" });
    button.addEventListener("click", () => { select(spans, span); zoomToSpan(spans, span); });
    return button;
  }

  /** Why is it idle here? @param {Spans} spans @param {number} rank @param {number} time */
  function explain(spans, rank, time) {
    const gap = gapAt(spans, rank, time);
    if (!gap) return false;
    state.gap = { spans, ...gap };
    state.selected = null;
    const details = byId("details"), idle = timeText(gap.to - gap.from);
    const what = deviceName(spans, rank);
    const lines = [element("strong", `${what[0].toUpperCase()}${what.slice(1)} is idle for ${idle}, from ${timeText(gap.from)} to ${timeText(gap.to)}`)];
    if (spans.fleet) lines.push(...fleetGapLines(report, spans, rank, gap).map((text) => element("p", text)));
    else if (gap.next < 0) {
      const path = criticalPath(spans), last = path[path.length - 1];
      const line = element("p", "It has nothing more to do. The step ends with ");
      line.append(link(spans, last), ` on device ${spans.rank[last]}.`);
      lines.push(line);
    } else {
      const chain = causesOfGap(spans, gap), made = chain[chain.length - 1];
      const line = element("p", "It waits to begin ");
      line.append(link(spans, gap.next), ".");
      lines.push(line);
      if (!chain.length) lines.push(element("p", "Everything that it needs was done when the gap began: the rest is launching, or a link that others use."));
      else {
        const list = element("ol");
        for (const span of chain) {
          const item = element("li");
          item.append(link(spans, span), ` on device ${spans.rank[span]}, ${timeText(spans.end[span] - spans.start[span])}, done at ${timeText(spans.end[span])}`);
          list.append(item);
        }
        const last = element("p", "Made late by ");
        last.append(link(spans, made), ` on device ${spans.rank[made]}: it had begun when the gap began, at ${timeText(spans.start[made])}.`);
        if (spans.start[made] > gap.from) last.replaceChildren("It goes back to ", link(spans, made), ` on device ${spans.rank[made]}, which began at ${timeText(spans.start[made])}${spans.waited[made] > 0 ? " after waiting" : ""}.`);
        lines.push(list, last);
      }
    }
    details.replaceChildren(...lines);
    repaint();
    return true;
  }

  /** What the critical path consists of. */
  function describeCritical() {
    state.selected = state.gap = null;
    byId("details").replaceChildren(element("strong", "Critical path"), ...shownTimelines().map((spans) => {
      const { count, times, between } = criticalTimes(report, spans);
      const parts = report.kinds.map((kind, place) => (times[place] ? `${kind} ${timeText(times[place])}` : "")).filter(Boolean);
      return element("p", `${spans.header.name}: ${count} spans; ${parts.join(", ")}; between them ${timeText(between)}.`);
    }));
  }

  function clear() {
    if (byId("critical").checked) { describeCritical(); return; }
    state.selected = state.gap = null;
    byId("details").replaceChildren(element("p", ofFleet ? "Click a span to see its job, or a gap to see why the device is idle." : "Click a span to see what it waited for, or a gap to see why the device is idle.", { class: "hint" }));
  }

  /** @param {[number, number] | null} range */
  function setRange(range) {
    state.range = range && range[1] > range[0] ? range : null;
    showSums(report, shownTimelines(), state.range);
    repaint();
  }

  /** @param {number} step */
  function goToHit(step) {
    if (!hits.length) return;
    hit = (hit + step + hits.length) % hits.length;
    const { spans, span } = hits[hit];
    select(spans, span);
    zoomToSpan(spans, span);
    byId("hits").textContent = `${hit + 1} of ${hits.length.toLocaleString("en")} spans`;
  }

  // Mouse.

  /** @type {{x: number, y: number, from: number, moved: boolean, range: boolean, scroll: number} | null} */
  let drag = null;
  overlay.addEventListener("pointerdown", (event) => {
    overlay.focus({ preventScroll: true });
    drag = { x: event.offsetX, y: event.offsetY, from: state.from, moved: false, range: event.shiftKey || event.offsetY < AXIS, scroll: scroller.scrollTop };
    overlay.setPointerCapture(event.pointerId);
    byId("tip").hidden = true;
  });
  overlay.addEventListener("pointermove", (event) => {
    if (!drag) { hover(event); return; }
    if (Math.abs(event.offsetX - drag.x) + Math.abs(event.offsetY - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    if (drag.range) {
      const times = [timeOf(drag.x), timeOf(event.offsetX)].map((time) => Math.round(Math.min(Math.max(time, 0), longest())));
      state.range = [Math.min(...times), Math.max(...times)];
      repaint();
    } else {
      const size = state.to - state.from;
      const from = drag.from - ((event.offsetX - drag.x) / (width - GUTTER)) * size;
      zoomTo(from, from + size);
      scroller.scrollTop = drag.scroll - (event.offsetY - drag.y);
    }
  });
  overlay.addEventListener("pointerup", (event) => {
    const ended = drag;
    drag = null;
    if (!ended) return;
    if (ended.moved) { if (ended.range) setRange(state.range); return; }
    const picked = pick(event.offsetX, event.offsetY);
    if (!picked) { clear(); repaint(); }
    else if (picked.span >= 0) select(picked.spans, picked.span);
    else { state.row = picked.row; if (!explain(picked.spans, picked.band.rank, picked.time)) { clear(); repaint(); } }
  });
  overlay.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  overlay.addEventListener("dblclick", (event) => {
    const picked = pick(event.offsetX, event.offsetY);
    if (picked && picked.span >= 0) zoomToSpan(picked.spans, picked.span);
  });
  overlay.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoomBy(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), timeOf(Math.max(GUTTER, event.offsetX)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      move(((event.deltaX || event.deltaY) / (width - GUTTER)) * (state.to - state.from));
    }
  }, { passive: false });

  /** The text of what is at a place. @param {number} x @param {number} y */
  function textAt(x, y) {
    const picked = pick(x, y);
    if (!picked) return "";
    if (picked.band.kind === "memory") {
      const { times, live } = memoryOf(picked.spans, picked.band.rank);
      let place = 0;
      while (place + 1 < times.length && times[place + 1] <= picked.time) place++;
      const limit = picked.spans.header.memoryLimit;
      return `device ${picked.band.rank}: ${bytesText(live[place])} at ${timeText(picked.time)}${limit ? `, of ${bytesText(limit)}` : ""}`;
    }
    const { other } = picked.band;
    const beside = other ? spanAt(other.spans, { lane: 0, from: other.from, to: other.to }, picked.time) : -1;
    const below = other && beside >= 0 ? ["", `${other.spans.header.name}: ${textOf(other.spans, beside)[0]}`, ...textOf(other.spans, beside).slice(1)] : [];
    if (picked.span >= 0) return [...textOf(picked.spans, picked.span), ...below].join("\n");
    if (picked.time < 0 || picked.time > picked.spans.header.makespan) return "";
    const gap = picked.band.kind === "compute" ? gapAt(picked.spans, picked.band.rank, picked.time) : null;
    return gap ? `${deviceName(picked.spans, picked.band.rank)}: idle for ${timeText(gap.to - gap.from)}\nclick to see why` : "";
  }
  /** @param {PointerEvent} event */
  function hover(event) {
    const tip = byId("tip"), text = textAt(event.offsetX, event.offsetY);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 430)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - 110)}px`;
  }

  // Keyboard.

  /** @param {number} step */
  function moveRow(step) {
    let row = state.row + step;
    while (layout.bands[row] && layout.bands[row].kind === "memory") row += step;
    if (!layout.bands[row]) return;
    state.row = row;
    reveal(layout.bands[row]);
    const band = layout.bands[row], middle = (state.from + state.to) / 2;
    if (band.from === band.to) { clear(); state.row = row; repaint(); return; }
    const span = Math.max(band.from, lastBegun(band.spans, { lane: 0, from: band.from, to: band.to }, middle));
    select(band.spans, span);
    state.row = row;
  }
  /** @param {number} step */
  function moveSpan(step) {
    const band = layout.bands[state.row];
    if (!band || band.kind === "memory" || band.from === band.to) return;
    const { selected } = state;
    const inBand = selected && selected.spans === band.spans && selected.span >= band.from && selected.span < band.to;
    const middle = (state.from + state.to) / 2;
    let span = inBand ? selected.span + step : lastBegun(band.spans, { lane: 0, from: band.from, to: band.to }, middle);
    span = Math.max(band.from, Math.min(band.to - 1, span));
    const row = state.row;
    select(band.spans, span);
    state.row = row;
    const { start, end } = band.spans;
    if (end[span] < state.from || start[span] > state.to) move((start[span] + end[span]) / 2 - (state.from + state.to) / 2);
  }
  /** The next time in which the row's device is idle. */
  function nextGap() {
    const band = layout.bands[state.row];
    if (!band || band.kind === "memory") return;
    const { spans, rank } = band;
    let time = state.gap && state.gap.rank === rank && state.gap.spans === spans ? state.gap.to : state.selected ? state.selected.spans.end[state.selected.span] : 0;
    for (let tries = 0; tries <= spans.start.length && time < spans.header.makespan; tries++) {
      const gap = gapAt(spans, rank, time);
      if (gap && gap.to > gap.from) { explain(spans, rank, time); return; }
      const ends = spans.rows[rank].filter((row) => isCompute(row.lane)).map((row) => spanAt(spans, row, time)).filter((span) => span >= 0).map((span) => spans.end[span]);
      time = Math.min(...ends, Infinity);
    }
    state.gap = null;
    byId("details").replaceChildren(element("p", `${deviceName(spans, rank)} has no later gap.`));
    repaint();
  }

  /** @type {{[key: string]: () => void}} */
  const keys = {
    "+": () => zoomBy(0.7, (state.from + state.to) / 2), "=": () => zoomBy(0.7, (state.from + state.to) / 2),
    "-": () => zoomBy(1 / 0.7, (state.from + state.to) / 2),
    ArrowLeft: () => move((state.from - state.to) * 0.15), ArrowRight: () => move((state.to - state.from) * 0.15),
    ArrowUp: () => moveRow(-1), ArrowDown: () => moveRow(1),
    n: () => moveSpan(1), p: () => moveSpan(-1), g: nextGap,
    b: () => { const { selected } = state; if (selected && selected.spans.after[selected.span] >= 0) { const cause = selected.spans.after[selected.span]; select(selected.spans, cause); zoomToSpan(selected.spans, cause); } },
    r: () => { const { selected, gap } = state; if (selected) setRange([selected.spans.start[selected.span], selected.spans.end[selected.span]]); else if (gap) setRange([gap.from, gap.to]); },
    c: () => { byId("critical").click(); },
    "/": () => byId("search").focus(),
    Enter: () => { const { selected, gap } = state; if (selected) zoomToSpan(selected.spans, selected.span); else if (gap) zoomTo(gap.from - (gap.to - gap.from), gap.to + (gap.to - gap.from)); },
    Escape: () => { clear(); setRange(null); zoomOut(); },
  };
  overlay.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.altKey || event.metaKey ? undefined : keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  for (const name of ["focus", "blur"]) overlay.addEventListener(name, repaint);

  function drawAllCharts() {
    if (ofFleet) drawFleetCharts(report, shownTimelines());
    else drawCharts(report);
  }

  // Controls.

  for (const id of ["first", "second"]) {
    timelines.forEach((spans, number) => byId(id).append(element("option", spans.header.name, { value: `${number}` })));
  }
  if (ofFleet) {
    document.body.classList.add("fleet");
    byId("overview-heading").textContent = "Policies";
    byId("run-heading").textContent = "Over time";
    byId("colour").options[0].textContent = "by job";
    byId("colour").options[1].textContent = "by team";
    byId("whole").textContent = "Whole time";
    byId("layout").value = "stacked";
    byId("jobs-section").hidden = false;
    byId("job-order").addEventListener("change", updateJobs);
    byId("search").addEventListener("input", updateJobs);
    for (const option of document.querySelectorAll("option.of-steps")) option.remove();
  }
  byId("second").append(element("option", "none", { value: "" }));
  byId("second").value = second ? "1" : "";
  const numRanks = Math.max(...timelines.map((spans) => spans.rows.length));
  const fewer = foldedRanks(timelines.slice(0, 2), "times").length;
  byId("fold").value = fewer * 2 <= numRanks && !ofFleet ? "times" : "all";
  byId("height").value = ofFleet ? "fit" : "18";
  byId("memory").checked = fewer <= 16 && timelines.slice(0, 2).some((spans) => spans.hasMemory);
  for (const id of ["first", "second", "layout", "fold", "height", "memory"]) byId(id).addEventListener("change", () => { relayout(); zoomTo(state.from, state.to); setTimeout(updateTables); });
  byId("colour").addEventListener("change", recolour);
  byId("critical").addEventListener("change", () => { clear(); recolour(); });
  byId("search").addEventListener("input", recolour);
  byId("search").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") goToHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { byId("search").value = ""; recolour(); overlay.focus(); }
  });
  byId("controls").addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
  byId("whole").addEventListener("click", () => { setRange(null); zoomOut(); });
  scroller.addEventListener("scroll", repaint);
  // An observer runs after the animation frames: without painting here, a resized canvas is black for a frame.
  new ResizeObserver(() => { resize(); paint(); }).observe(scroller);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => { resize(); recolour(); paint(); drawAllCharts(); });
  }

  // The rest of the page, once the timeline is painted.

  relayout();
  zoomOut();
  clear();
  paint();
  const firstPicture = performance.now();
  updateTables();
  if (ofFleet) showFleetOverview(report, timelines);
  else { showOverview(report, timelines); drawCharts(report); }
  byId("assumptions").replaceChildren(...report.assumptions.map((text) => element("li", text)), ...report.attachments.map((name) => {
    const item = element("li", "Trace of torch.profiler beside the run: ");
    item.append(element("code", name));
    return item;
  }));
  document.title = report.title;

  // For tests and for scripts in the console.
  window.spindleReport = {
    report, timelines, state, paint, pick, textAt, zoomTo, zoomOut, zoomToSpan, select, explain, setRange, chooseJob,
    deviceSums: (/** @type {number} */ number, /** @type {number} */ from, /** @type {number} */ to) => timelines[number].rows.map((_, rank) => deviceSums(report, timelines[number], rank, from, to)),
    criticalPath: (/** @type {number} */ number) => criticalPath(timelines[number]),
    place: (/** @type {number} */ number, /** @type {number} */ span) => { const spans = timelines[number]; return pointOf(spans, span, (spans.start[span] + spans.end[span]) / 2); },
    at: (/** @type {number} */ number, /** @type {number} */ rank, /** @type {number} */ time) => { const band = bandOf(timelines[number], rank, 0); return [xOf(time), band ? yOf(band.top + band.height / 2) : AXIS]; },
    causes: (/** @type {number} */ number, /** @type {number} */ rank, /** @type {number} */ time) => { const gap = gapAt(timelines[number], rank, time); return gap && { ...gap, chain: causesOfGap(timelines[number], gap) }; },
    chosenJob: () => chosenJob,
    firstPicture,
  };
}
