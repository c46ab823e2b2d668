
// A page that a scheduler serves: when there is a newer version it is loaded, and shows what this one did.

const LIVE = { version: "%VERSION%", everyMs: 2000, key: "spindle-view", shown: ["first", "second", "layout", "colour", "fold", "height", "search", "job-order"] };

/** What is shown, so that the next page can show the same. */
function viewOf() {
  const { report, state, timelines } = window.spindleReport;
  const all = Math.max(1, ...timelines.map((/** @type {Spans} */ spans) => spans.header.makespan));
  /** @type {Record<string, string>} */
  const values = {};
  for (const id of LIVE.shown) values[id] = byId(id).value;
  const isWhole = state.from <= 0 && state.to >= all;
  const job = window.spindleReport.chosenJob();
  return { values, job, from: isWhole ? null : state.from * report.unit, to: state.to * report.unit, scroll: window.scrollY, rows: byId("scroll").scrollTop };
}

/** Show what the page before did. */
function restoreView() {
  const text = sessionStorage.getItem(LIVE.key);
  sessionStorage.removeItem(LIVE.key);
  if (!text) return;
  const view = JSON.parse(text), { report, zoomTo, chooseJob, zoomOut } = window.spindleReport;
  for (const id of LIVE.shown) {
    const element = byId(id);
    if (element.value === view.values[id]) continue;
    element.value = view.values[id];
    element.dispatchEvent(new Event(id === "search" ? "input" : "change"));
  }
  if (view.job >= 0) chooseJob(view.job);
  if (view.from === null) zoomOut();
  else zoomTo(view.from / report.unit, view.to / report.unit);
  byId("scroll").scrollTop = view.rows;
  window.scrollTo(0, view.scroll);
}

/** Load a newer version, unless somebody is dragging or typing. */
async function refresh() {
  try {
    const answer = await fetch("version", { cache: "no-store" });
    const version = (await answer.text()).trim();
    const isBusy = pressed > 0 || document.activeElement === byId("search") || document.hidden;
    if (answer.ok && version !== LIVE.version && !isBusy) {
      sessionStorage.setItem(LIVE.key, JSON.stringify(viewOf()));
      location.reload();
      return;
    }
    byId("live").textContent = "live";
  } catch {
    byId("live").textContent = "the scheduler is down; this is what it last showed";
  }
  setTimeout(refresh, LIVE.everyMs);
}

let pressed = 0;
window.addEventListener("pointerdown", () => { pressed = 1; });
window.addEventListener("pointerup", () => { pressed = 0; });
const sign = document.createElement("span");
sign.id = "live";
sign.setAttribute("role", "status");
sign.textContent = "live";
byId("subtitle").after(sign);
const waiting = setInterval(() => {
  if (!window.spindleReport) return;
  clearInterval(waiting);
  restoreView();
  setTimeout(refresh, LIVE.everyMs);
}, 20);
