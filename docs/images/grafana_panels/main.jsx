// Draws stat and time-series panels of one dashboard with Grafana's own components. The server beside it gives
// /dashboard.json and passes /prometheus/ on; ?seconds= is the length of the shown time range.
import { createRoot } from 'react-dom/client';
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import { FieldType, createTheme, dateTime, getDisplayProcessor, toDataFrame } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';

const CELL_WIDTH = 50, CELL_HEIGHT = 30, GAP = 8, STEP_S = 5, TOP_ROW = 1;
await initPluginTranslations('grafana-panels');
const theme = createTheme({ colors: { mode: 'dark' } });
const dashboard = await (await fetch('/dashboard.json')).json();
const seconds = Number(new URLSearchParams(location.search).get('seconds'));
const until = Date.now(), from = until - seconds * 1000;
const timeRange = { from: dateTime(from), to: dateTime(until), raw: { from: `now-${seconds}s`, to: 'now' } };
const fill = (text) => text.replaceAll('$__rate_interval', '20s').replaceAll('$__interval', '5s').replace(/\$\w+/g, '.*');

async function query(expression) {
  const range = { query: fill(expression), start: from / 1000, end: until / 1000, step: STEP_S };
  const answer = await (await fetch('/prometheus/api/v1/query_range?' + new URLSearchParams(range))).json();
  return answer.data?.result ?? [];
}

function frame(panel, target, series, index) {
  const name = (target.legendFormat || '').replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => series.metric[label] ?? '');
  const defaults = panel.fieldConfig?.defaults ?? {};
  const custom = { drawStyle: 'line', lineWidth: 1, fillOpacity: 10, showPoints: 'never', ...defaults.custom };
  const config = { ...defaults, displayNameFromDS: name || panel.title, custom };
  for (const { matcher, properties } of panel.fieldConfig?.overrides ?? [])
    if (matcher.id === 'byName' && matcher.options === name)
      for (const { id, value } of properties)
        if (id.startsWith('custom.')) custom[id.slice('custom.'.length)] = value;
        else config[id] = value;
  if (!config.color || config.color.mode === 'thresholds') config.color = { mode: 'palette-classic' };
  const found = toDataFrame({
    fields: [
      { name: 'Time', type: FieldType.time, values: series.values.map(([at]) => at * 1000), config: {} },
      { name: 'Value', type: FieldType.number, values: series.values.map(([, value]) => Number(value)), config },
    ],
  });
  for (const field of found.fields) {
    if (field.type === FieldType.number) field.state = { seriesIndex: index };
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  }
  return found;
}

async function frames(panel) {
  const found = [];
  for (const target of panel.targets ?? [])
    for (const series of await query(target.expr)) found.push(frame(panel, target, series, found.length));
  return found;
}

function body(panel, shown) {
  if (!shown.length) return () => <div style={{ color: '#888', padding: 20 }}>No data</div>;
  if (panel.type === 'timeseries') {
    const legend = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] };
    return (width, height) => (
      <TimeSeries frames={shown} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={legend} options={{}} />
    );
  }
  const [time, value] = shown[0].fields;
  const last = value.display(value.values[value.values.length - 1]);
  return (width, height) => (
    <BigValue theme={theme} width={width} height={height} value={last} colorMode={BigValueColorMode.Value}
      graphMode={BigValueGraphMode.Area} sparkline={{ y: value, x: time }} />
  );
}

function Panel({ panel, shown }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * CELL_WIDTH, top: (y - TOP_ROW) * CELL_HEIGHT };
  return (
    <div style={place}>
      <PanelChrome title={fill(panel.title)} width={w * CELL_WIDTH - GAP} height={h * CELL_HEIGHT - GAP}>{body(panel, shown)}</PanelChrome>
    </div>
  );
}

const panels = dashboard.panels.filter((panel) => ['stat', 'timeseries'].includes(panel.type));
const data = await Promise.all(panels.map(frames));
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ position: 'relative' }}>{panels.map((panel, i) => <Panel key={i} panel={panel} shown={data[i]} />)}</div>
  </ThemeContext.Provider>,
);
document.title = 'ready';
