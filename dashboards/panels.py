"""The kinds of panels: every one has a unit, and says what it shows and what to do when it looks wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as shapes, heatmap as heatmaps
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

from dashboards.queries import Series

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
IDLE = "idle"  # where a share or a quantile has no value: nothing happened
# Unit -> the least top of an axis: Grafana draws nothing but zeros up to 100.
LEAST_TOPS = {"percentunit": 0.01, "reqps": 1, "ops": 1, "short": 1, "s": 1e-4}
HIDDEN_COLUMNS = ("Time", "Value")

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel
P = TypeVar("P")


class Words(TypedDict):
    """What a panel shows, and what to do when it looks wrong."""

    shows: str
    act: str


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
    title: str,
    series: Series,
    unit: str,
    *,
    stack: bool = False,
    limits: Limits = NO_LIMITS,
    maximum: float | None = None,
    width: int = 8,
    unstacked: Sequence[str] = (),
    colors: Mapping[str, str] = {},
    shades: Mapping[str, str] = {},
    exemplars: str = "",
    **words: Unpack[Words],
) -> timeseries.Panel:
    """Values over time. Stacked ones are areas; series named in `unstacked` stay dashed lines over them.

    `colors` are those of series whose names have these words; `shades` where several series have the same word. `exemplars` is the
    series of a histogram whose buckets name requests, which are shown as dots.
    """
    panel = _common(timeseries.Panel(), title, series, unit, words, limits=limits, exemplars=exemplars)
    panel.span(width).height(8)
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
        for word, color in named.items():
            value = DynamicConfigValue(id_val="color", value={"mode": mode, "fixedColor": color})
            panel.override_by_regexp(f"/(^| ){word}( |$)/", [value])
    for name in unstacked:
        panel.override_by_name(name, _as_line())
    return panel


areas = partial(lines, stack=True)


def number(
    title: str,
    query: str,
    unit: str,
    *,
    limits: Limits = NO_LIMITS,
    width: int = 3,
    decimals: int | None = None,
    instant: bool = False,
    **words: Unpack[Words],
) -> stat.Panel:
    """One value, coloured by its limits, with its course over time in the background unless it is an `instant` one."""
    panel = _common(stat.Panel(), title, {"": query}, unit, words, limits=limits, instant=instant)
    graph = shapes.BigValueGraphMode.NONE if instant else shapes.BigValueGraphMode.AREA
    panel.graph_mode(graph).text_mode(shapes.BigValueTextMode.VALUE).span(width).height(4)
    panel.color_mode(shapes.BigValueColorMode.VALUE).justify_mode(shapes.BigValueJustifyMode.AUTO)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)).orientation(shapes.VizOrientation.AUTO)
    panel.reduce_options(common.ReduceDataOptions().values(False).calcs(["lastNotNull"]).fields(""))
    return panel if decimals is None else panel.decimals(decimals)


def heat(title: str, query: str, unit: str, **words: Unpack[Words]) -> heatmap.Panel:
    """A histogram over time: colour says how many observations fell into a cell, and empty cells are left out."""
    panel = _common(heatmap.Panel(), title, {"{{le}}": query}, "short", words, form=PromQueryFormat.HEATMAP)
    panel.span(12).height(8)
    panel.calculate(False).cell_gap(1).show_legend().show_tooltip().show_y_histogram()
    panel.show_value(shapes.VisibilityMode.NEVER).exemplars_color("rgba(255,0,255,0.7)")
    # Grafana turns the scheme around in its light theme, so no panel's words may say which end is bright.
    panel.color(heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64))
    panel.filter_values(heatmap.FilterValueRange().le(1e-9)).cell_values(heatmap.CellValues().unit("short"))
    return panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(shapes.AxisPlacement.LEFT))


def rows(
    title: str, query: str, columns: Sequence[str], *, width: int = 24, height: int = 6, **words: Unpack[Words]
) -> table.Panel:
    """A table of labels, a row a series."""
    panel = _common(table.Panel(), title, {"": query}, "none", words, form=PromQueryFormat.TABLE, instant=True)
    panel.span(width).height(height)
    order = {
        "excludeByName": dict.fromkeys(HIDDEN_COLUMNS, True),
        "indexByName": {name: place for place, name in enumerate(columns)},
        "renameByName": {name: name.replace("_", " ") for name in columns},
    }
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=order))
    return panel.show_header(True).cell_height(shapes.TableCellHeight.SM)


def _common(
    panel: P,
    title: str,
    series: Series,
    unit: str,
    words: Words,
    *,
    limits: Limits = NO_LIMITS,
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
    instant: bool = False,
    exemplars: str = "",
) -> P:
    """What all kinds have; their builders share no class."""
    one: Any = panel
    one.title(title).description(f"{words['shows']}\n\n**When it looks wrong:** {words['act']}")
    one.datasource(SOURCE).unit(unit).thresholds(limits.build()).no_value(IDLE).mappings([_idle()])
    for letter, (legend, query) in zip("ABCDEFGH", series.items(), strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query).legend_format(legend)
        target.format(form).editor_mode(QueryEditorMode.CODE).exemplar(bool(exemplars) and legend == exemplars)
        one.with_target(target.instant() if instant else target.range())
    return panel


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
