"""The kinds of panels: every one has a unit, and says what it shows and what to do when it looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

from dashboards.queries import Query

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
IDLE = "idle"  # where a share or a quantile has no value: nothing happened
LEAST_TOPS = {
    "percentunit": 0.01,
    "reqps": 1,
    "ops": 1,
    "short": 1,
    "s": 1e-4,
}  # of axes: Grafana draws nothing but zeros up to 100
HIDDEN_COLUMNS = ("Time", "Value")

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel | bargauge.Panel


P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A panel's words. `act` is what to do when it looks wrong."""

    title: str
    shows: str
    act: str

    @property
    def description(self) -> str:
        """Both parts as Grafana's Markdown."""
        return f"{self.shows}\n\n**When it looks wrong:** {self.act}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Colours by value: the first is the one below every limit. Each panel's words say what its limits mean."""

    base: str
    steps: tuple[tuple[float, str], ...]

    def build(self) -> dashboard.ThresholdsConfig:
        """As Grafana's thresholds."""
        steps = [
            Threshold(value=None, color=self.base),
            *(Threshold(value=value, color=color) for value, color in self.steps),
        ]
        return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


NO_LIMITS = Limits(base="text", steps=())  # neither good nor bad: no colour


def high_is_bad(orange: float, red: float) -> Limits:
    """Green, orange from one value on, red from the other."""
    return Limits(base="green", steps=((orange, "orange"), (red, "red")))


def low_is_bad(red_below: float, orange_below: float) -> Limits:
    """Red below one value, orange below the other, then green."""
    return Limits(base="red", steps=((red_below, "orange"), (orange_below, "green")))


def lines(
    about: About,
    queries: Sequence[Query],
    unit: str,
    *,
    stack: bool = False,
    limits: Limits = NO_LIMITS,
    maximum: float | None = None,
    width: int = 8,
    unstacked: Sequence[str] = (),
    colors: Mapping[str, str] = {},
    shades: Mapping[str, str] = {},
) -> timeseries.Panel:
    """Values over time. Stacked ones are areas; series named in `unstacked` stay dashed lines over them.

    `colors` are those of series whose names have these words; `shades` where several series have the same word.
    """
    panel = _common(timeseries.Panel(), about, queries, unit, limits).span(width).height(8)
    panel.line_width(1).fill_opacity(60 if stack else 8).show_points(shapes.VisibilityMode.NEVER).min(0)
    panel.tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    panel.legend(_legend()).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    if stack:
        panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel.max(maximum)
    elif unit in LEAST_TOPS:
        panel.axis_soft_max(LEAST_TOPS[unit])
    if limits.steps:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(shapes.GraphTresholdsStyleMode.DASHED))
    for mode, named in (("fixed", colors), ("shades", shades)):
        for words, color in named.items():
            value = DynamicConfigValue(id_val="color", value={"mode": mode, "fixedColor": color})
            panel.override_by_regexp(f"/(^| ){words}( |$)/", [value])
    for name in unstacked:
        panel.override_by_name(name, _as_line())
    return panel


def number(
    about: About, query: Query, unit: str, *, limits: Limits = NO_LIMITS, width: int = 3, decimals: int | None = None
) -> stat.Panel:
    """One value, coloured by its limits, with its course over time in the background."""
    panel = _common(stat.Panel(), about, [query], unit, limits).span(width).height(4)
    graph = shapes.BigValueGraphMode.NONE if query.instant else shapes.BigValueGraphMode.AREA
    panel.graph_mode(graph).color_mode(shapes.BigValueColorMode.VALUE).justify_mode(shapes.BigValueJustifyMode.AUTO)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    panel.text_mode(shapes.BigValueTextMode.VALUE).orientation(shapes.VizOrientation.AUTO)
    panel.reduce_options(common.ReduceDataOptions().values(False).calcs(["lastNotNull"]).fields(""))
    return panel if decimals is None else panel.decimals(decimals)


def named_numbers(about: About, judged: Sequence[tuple[Query, Limits]], unit: str, *, width: int = 3) -> stat.Panel:
    """A few values beside each other, with the names of their queries and limits of their own."""
    panel = number(about, judged[0][0], unit, limits=judged[0][1], width=width, decimals=0)
    panel.text_mode(shapes.BigValueTextMode.VALUE_AND_NAME).graph_mode(shapes.BigValueGraphMode.NONE)
    for letter, (query, limits) in zip("BCDEFGH", judged[1:], strict=False):
        value = DynamicConfigValue(id_val="thresholds", value=limits.build().build())
        panel.with_target(_target(query, letter, PromQueryFormat.TIME_SERIES)).override_by_name(query.legend, [value])
    return panel


def bars(
    about: About, queries: Sequence[Query], unit: str, *, limits: Limits = NO_LIMITS, width: int = 8
) -> bargauge.Panel:
    """The latest value of every series as a horizontal bar."""
    panel = _common(bargauge.Panel(), about, queries, unit, limits).span(width).height(8).min(0)
    panel.display_mode(shapes.BarGaugeDisplayMode.BASIC).orientation(shapes.VizOrientation.HORIZONTAL)
    panel.value_mode(shapes.BarGaugeValueMode.COLOR).show_unfilled(True)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    return panel.reduce_options(common.ReduceDataOptions().values(False).calcs(["lastNotNull"]).fields(""))


def grid(about: About, query: Query, unit: str, *, width: int = 12) -> heatmap.Panel:
    """A row of cells for each series, coloured by its value, a share from 0 to 1."""
    panel = _common(heatmap.Panel(), about, [query], unit, NO_LIMITS).span(width).height(8)
    panel.calculate(False).cell_gap(1).show_legend().show_tooltip().show_value(shapes.VisibilityMode.NEVER)
    panel.color(_heat_colors().min(0).max(1)).cell_values(heatmap.CellValues().unit(unit))
    panel.filter_values(heatmap.FilterValueRange().le(-1))  # zeros are cells too: idle is not absent
    return panel.y_axis(heatmap.YAxisConfig().axis_placement(shapes.AxisPlacement.LEFT))


def heat(about: About, expr: str, unit: str, *, cells: str = "short", width: int = 12) -> heatmap.Panel:
    """A histogram over time: colour says how many observations fell into a cell, and empty cells are left out."""
    query = Query(expr=expr, legend="{{le}}")
    panel = _common(heatmap.Panel(), about, [query], cells, NO_LIMITS, PromQueryFormat.HEATMAP).span(width).height(8)
    panel.calculate(False).cell_gap(1).show_legend().show_tooltip().show_y_histogram()
    panel.show_value(shapes.VisibilityMode.NEVER).exemplars_color("rgba(255,0,255,0.7)")
    panel.color(_heat_colors())
    panel.filter_values(heatmap.FilterValueRange().le(1e-9)).cell_values(heatmap.CellValues().unit(cells))
    return panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(shapes.AxisPlacement.LEFT))


def rows(about: About, expr: str, columns: Sequence[str], *, width: int = 24, height: int = 6) -> table.Panel:
    """A table of labels, a row a series."""
    query = Query(expr=expr, instant=True)
    panel = _common(table.Panel(), about, [query], "none", NO_LIMITS, PromQueryFormat.TABLE).span(width).height(height)
    order = {
        "excludeByName": dict.fromkeys(HIDDEN_COLUMNS, True),
        "indexByName": {name: place for place, name in enumerate(columns)},
        "renameByName": {name: name.replace("_", " ") for name in columns},
    }
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=order))
    return panel.show_header(True).cell_height(shapes.TableCellHeight.SM)


def _common(
    panel: P,
    about: About,
    queries: Sequence[Query],
    unit: str,
    limits: Limits,
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> P:
    """What all kinds have; their builders share no class."""
    one: Any = panel
    one.title(about.title).description(about.description).datasource(SOURCE).unit(unit)
    one.thresholds(limits.build()).no_value(IDLE).mappings([_idle()])
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        one.with_target(_target(query, letter, form))
    return panel


def _heat_colors() -> heatmap.HeatmapColorOptions:
    """Grafana turns the scheme around in its light theme, so no panel's words may say which end is bright."""
    return heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64)


def _target(query: Query, letter: str, form: PromQueryFormat) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query.expr).legend_format(query.legend)
    target.format(form).editor_mode(QueryEditorMode.CODE).exemplar(query.exemplars)
    return target.instant() if query.instant else target.range()


def _idle() -> SpecialValueMap:
    result = ValueMappingResult(text=IDLE)
    return SpecialValueMap(options=DashboardSpecialValueMapOptions(match=SpecialValueMatch.NULL_AND_NAN, result=result))


def _legend() -> common.VizLegendOptions:
    """Names alone: a last value would stand there for workers that are gone, too."""
    legend = common.VizLegendOptions().show_legend(True).display_mode(shapes.LegendDisplayMode.LIST)
    return legend.placement(shapes.LegendPlacement.BOTTOM).calcs([])


def _as_line() -> list[DynamicConfigValue]:
    return [
        DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
        DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
        DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": "text"}),
    ]
