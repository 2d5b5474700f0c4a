/** Binds the modules to the page's elements and starts them. */

import { App } from "./app.js";
import { Inspector, lineOf, Tooltip } from "./block_details.js";
import { GroupHues, Theme } from "./colours.js";
import { Cursor } from "./cursor.js";
import { FilterControls, Filters } from "./filters.js";
import { ApiKeyStore, askForKey, Connection } from "./frame_sources.js";
import { Keyboard } from "./keyboard.js";
import { MapView, stateOf } from "./map_view.js";
import { Counters, DEVICE_LOOKS, EventLog, HOST_LOOKS, Legend, RequestsPanel } from "./panels.js";
import { Announcer, StatusLine } from "./status.js";
import { Strip } from "./strip.js";
import { setText } from "./text.js";
import { TimeControls } from "./timeline.js";

const ADDRESS = new URL("../", import.meta.url); // of /blocks/, under any path prefix
const parameters = new URLSearchParams(location.search);
const find = (id) => document.getElementById(id);

const keys = new ApiKeyStore();
const filters = new Filters(() => app.requestRender(true));
const hues = new GroupHues();
const app = new App({ filters, hues });
const announcer = new Announcer(find("announcer"));
const chooseRequest = (request) => {
  filters.set({ request });
  announcer.say(`Showing the blocks of ${request} only.`);
};

const map = new MapView({
  scroller: find("map-scroller"), world: find("map-world"), canvas: find("map"),
  view: {
    workers: () => app.visibleWorkers(), dimmer: (worker, state) => app.dimmer(worker, state), hues, noteOf: (worker) => app.noteOf(worker),
    isJustGone: (worker) => app.isJustGone(worker),
  },
});
const inspector = new Inspector({ panel: find("inspector"), onRequest: chooseRequest });
const tooltip = new Tooltip({ tip: find("tooltip"), box: find("map-box") });
const cursor = new Cursor({ map, outline: find("cursor"), onChange: showTarget });
const legend = new Legend(find("legend"), DEVICE_LOOKS);
const hostLegend = new Legend(find("host-legend"), HOST_LOOKS);
const counters = new Counters({ table: find("counters"), requests: find("request-counts") });
const requestsPanel = new RequestsPanel({ list: find("requests"), suggestions: find("request-ids"), onRequest: chooseRequest });
const eventLog = new EventLog({ list: find("events"), onRequest: chooseRequest });
const strip = new Strip({ box: find("strip"), onSeek: (time_s) => app.timeline.seek(time_s) });
const timeControls = new TimeControls({
  toggle: find("toggle"), back: find("back"), forth: find("forth"), slider: find("slider"), live: find("go-live"), label: find("moment"),
  timeline: app.timeline,
});
const filterControls = new FilterControls({
  worker: find("worker-filter"), group: find("group-filter"), request: find("request-filter"), clear: find("clear-filters"), filters,
});
const theme = new Theme({ button: find("theme"), onChange: () => app.requestRender(true) });

let paintedTheme = 0;

function draw() {
  if (paintedTheme !== theme.version) map.setStyles(theme.styles);
  paintedTheme = theme.version;
  const workers = app.visibleWorkers();
  const present = app.presentWorkers();
  find("nothing").hidden = workers.length > 0;
  setText(find("nothing"), app.whyEmpty());
  setText(find("problems"), app.problemsWithoutHeading().join(" "));
  map.paint();
  cursor.refresh();
  showTarget("frame");
  timeControls.update();
  filterControls.update([...app.workers.keys()], app.groupNames());
  counters.update(present);
  legend.update(app.groupNames(), present.map(({ shown }) => shown), theme.styles, theme.version);
  const hosts = present.flatMap(({ shown }) => (shown.host ? [shown.host] : []));
  find("host-panel").hidden = !hosts.length;
  hostLegend.update(app.groupNames(), hosts, theme.styles, theme.version);
  requestsPanel.update(present, filters.request);
  eventLog.update(app.timeline.isLive ? Infinity : app.timeline.shown_s, filters);
  announcer.update(present, timeControls.describe(), Date.now() / 1000);
  document.title = app.timeline.isLive ? "Transom blocks" : "Paused: Transom blocks";
}

function drawStrip() {
  const workers = app.recordedWorkers();
  const visible = app.visibleWorkers();
  const shown_s = app.timeline.isLive || !visible.length ? null : Math.max(...visible.map(({ shown }) => shown.time_s));
  strip.update({ groups: app.groupNames(workers), workers, hues, colours: theme.colours, shown_s, chosenGroup: filters.group });
}

/** Show the cursor's target. `how` is why it may have changed: "pointer", "click", "keyboard" or "frame". */
function showTarget(how) {
  const { target } = cursor;
  inspector.show(target);
  const hasTooltip = target === cursor.hovered || how === "keyboard" || document.activeElement === map.canvas;
  tooltip.show(hasTooltip ? target : null, rectOnScreen(target));
  if (how === "keyboard") announcer.say(lineOf(target));
}

function rectOnScreen(target) {
  const rect = target === null ? null : map.rectOf(target);
  if (rect === null) return null;
  const [left, top, width, height] = rect.map((length) => length / map.pixelRatio);
  return { left, top: top - map.scroller.scrollTop, width, height };
}

function chooseRequestOfTarget() {
  const { target } = cursor;
  if (target === null || target.block === null) return;
  const [found] = stateOf(target).sequencesOf(target.group, target.block);
  if (found) chooseRequest(found.sequence.request);
  else announcer.say("No request uses this block.");
}

function zoom(by) {
  if (by === 0) map.zoom.fit();
  else map.zoom.change(by);
  app.requestRender(true);
}

function step(direction) {
  app.timeline.step(direction);
  announcer.say(timeControls.describe());
}

function toggle() {
  app.timeline.toggle();
  announcer.say(timeControls.describe());
}

function clear() {
  if (filters.request) filters.set({ request: "" });
  else cursor.clear();
}

function bindMap() {
  const { canvas, scroller } = map;
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => cursor.hover([offsetX, offsetY]));
  canvas.addEventListener("pointerleave", () => cursor.hover(null));
  canvas.addEventListener("click", () => cursor.choose());
  canvas.addEventListener("dblclick", chooseRequestOfTarget);
  canvas.addEventListener("blur", () => showTarget("frame"));
  scroller.addEventListener("scroll", () => app.requestRender(false));
  new ResizeObserver(() => app.requestRender(true)).observe(scroller);
}

function bindButtons() {
  find("zoom-in").addEventListener("click", () => zoom(1));
  find("zoom-out").addEventListener("click", () => zoom(-1));
  find("zoom-fit").addEventListener("click", () => zoom(0));
  find("help-button").addEventListener("click", () => find("help").showModal());
  new Keyboard({
    map: map.canvas, off: find("no-shortcuts"),
    actions: {
      toggle, step, clear, zoom, goLive: () => app.timeline.goLive(), focusFilter: () => find("request-filter").focus(),
      focusMap: () => map.canvas.focus(), switchTheme: () => theme.toggle(), help: () => find("help").showModal(),
      saySummary: () => announcer.saySummary(app.presentWorkers(), timeControls.describe(), Date.now() / 1000),
      move: (dx, dy) => cursor.move(dx, dy), movePage: (direction) => cursor.movePage(direction),
      moveToEnd: (isLast) => cursor.moveToEnd(isLast), chooseRequest: chooseRequestOfTarget,
    },
  });
}

function streamAddress() {
  const url = new URL("stream", ADDRESS);
  for (const name of ["worker", "period_s"]) if (parameters.has(name)) url.searchParams.set(name, parameters.get(name));
  return url;
}

function start() {
  const onEvent = (event, data) => app.takeEvent(event, data);
  app.source = new Connection({
    url: streamAddress(), keys, onEvent, onStatus: (status) => app.setStatus(status),
    askForKey: (wasRefused) => askForKey(find("key-dialog"), wasRefused),
  });
  app.source.run();
}

const status = new StatusLine({ pill: find("status"), message: find("status-message"), announcer });
app.parts = { draw, drawStrip, eventLog, announcer, status };
globalThis.transomBlockMap = app; // for the console and the tests
app.map = map;
app.cursor = cursor;
bindMap();
bindButtons();
start();
setInterval(() => app.tick(), 1000);
app.requestRender(true);
