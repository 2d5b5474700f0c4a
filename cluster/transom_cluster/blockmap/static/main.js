/** Binds the modules to the page's elements and starts them. */

import { App } from "./app.js";
import { Describer, Inspector, Tooltip } from "./block_details.js";
import { GroupHues, Theme } from "./colours.js";
import { Cursor } from "./cursor.js";
import { FilterControls, Filters } from "./filters.js";
import { ApiKeyStore, askForKey, Connection } from "./frame_sources.js";
import { MapView, stateOf } from "./map_view.js";
import { Counters, DEVICE_LOOKS, EventLog, HOST_LOOKS, Legend, RequestsPanel } from "./panels.js";
import { Strip } from "./strip.js";
import { setText } from "./text.js";

const ADDRESS = new URL("../", import.meta.url); // of /blocks/, under any path prefix
const STATUS_TEXTS = { connecting: "Connecting", live: "Connected", paused: "Paused", lost: "Connection lost", key: "API key wanted" };
const parameters = new URLSearchParams(location.search);
const find = (id) => document.getElementById(id);

const keys = new ApiKeyStore();
const filters = new Filters(() => app.requestRender(true));
const hues = new GroupHues();
const app = new App({ filters, hues });
const chooseRequest = (request) => filters.set({ request });

const map = new MapView({
  scroller: find("map-scroller"), world: find("map-world"), canvas: find("map"),
  view: {
    workers: () => app.visibleWorkers(), dimmer: (worker, state) => filters.dimmer(worker, state), hues,
  },
});
const inspector = new Inspector({ panel: find("inspector"), onRequest: chooseRequest });
const describer = new Describer({ url: new URL("describe", ADDRESS), keys, onRows: (rows) => inspector.showDetails(rows) });
const tooltip = new Tooltip({ tip: find("tooltip"), box: find("map-box") });
const cursor = new Cursor({ map, outline: find("cursor"), onChange: showTarget });
const legend = new Legend(find("legend"), DEVICE_LOOKS);
const hostLegend = new Legend(find("host-legend"), HOST_LOOKS);
const counters = new Counters({ table: find("counters"), requests: find("request-counts") });
const requestsPanel = new RequestsPanel({ list: find("requests"), suggestions: find("request-ids"), onRequest: chooseRequest });
const eventLog = new EventLog({ list: find("events"), onRequest: chooseRequest });
const strip = new Strip(find("strip"));
const filterControls = new FilterControls({
  worker: find("worker-filter"), group: find("group-filter"), request: find("request-filter"), clear: find("clear-filters"), filters,
});
const theme = new Theme(() => app.requestRender(true));

let paintedTheme = 0;
let isConnected = false; // if not, the page shows the past, and the server would describe the present

function draw() {
  if (paintedTheme !== theme.version) map.setStyles(theme.styles);
  paintedTheme = theme.version;
  const workers = app.visibleWorkers();
  find("nothing").hidden = workers.length > 0;
  setText(find("problems"), app.problemsWithoutHeading().join(" "));
  map.paint();
  cursor.refresh();
  showTarget();
  showTime(workers.length > 0);
  filterControls.update([...app.workers.keys()], app.groupNames());
  counters.update(workers);
  legend.update(app.groupNames(), workers.map(({ state }) => state), theme.styles, theme.version);
  const hosts = workers.flatMap(({ state }) => (state.host ? [state.host] : []));
  find("host-panel").hidden = !hosts.length;
  hostLegend.update(app.groupNames(), hosts, theme.styles, theme.version);
  requestsPanel.update(workers, filters.request);
  eventLog.update(filters);
}

/** An empty map cannot be paused. */
function showTime(hasBlocks) {
  const { isPaused } = app.source;
  const toggle = find("toggle");
  toggle.disabled = !hasBlocks;
  toggle.dataset.icon = isPaused ? "play" : "pause";
  setText(toggle.querySelector("[data-word]"), isPaused ? "Resume" : "Pause");
  find("moment").classList.toggle("paused", isPaused);
  setText(find("moment"), app.moment());
  document.title = isPaused ? "Paused: Transom blocks" : "Transom blocks";
}

function drawStrip() {
  strip.update({ groups: app.groupNames(), workers: app.visibleWorkers(), hues, colours: theme.colours, chosenGroup: filters.group });
}

/** Show what the cursor points at. */
function showTarget() {
  const { target } = cursor;
  inspector.show(target);
  describer.lookAt(isConnected ? target : null);
  tooltip.show(target === cursor.hovered ? target : null, rectOnScreen(target));
}

/** Show a status {kind, message, retry_s} of the stream (frame_sources.js). */
function showStatus({ kind, message = "", retry_s = null }) {
  isConnected = kind === "live";
  find("status").dataset.kind = kind;
  setText(find("status"), STATUS_TEXTS[kind]);
  setText(find("status-message"), retry_s === null ? message : `${message} Trying again in ${retry_s} s.`);
  app.requestRender(false);
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
}

function zoom(by) {
  if (by === 0) map.zoom.fit();
  else map.zoom.change(by);
  app.requestRender(true);
}

function toggle() {
  app.source.toggle();
  app.requestRender(false);
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
  scroller.addEventListener("scroll", () => app.requestRender(false));
  new ResizeObserver(() => app.requestRender(true)).observe(scroller);
}

function bindButtons() {
  find("toggle").addEventListener("click", toggle);
  find("zoom-in").addEventListener("click", () => zoom(1));
  find("zoom-out").addEventListener("click", () => zoom(-1));
  find("zoom-fit").addEventListener("click", () => zoom(0));
  document.addEventListener("keydown", ({ key }) => {
    if (key === "Escape") clear();
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
    url: streamAddress(), keys, onEvent, onStatus: showStatus, askForKey: (wasRefused) => askForKey(find("key-dialog"), wasRefused),
  });
  app.source.run();
}

app.parts = { draw, drawStrip, eventLog };
globalThis.transomBlockMap = app; // for the console and the tests
app.map = map;
app.cursor = cursor;
bindMap();
bindButtons();
start();
app.requestRender(true);
