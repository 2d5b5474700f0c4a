"""A dashboard around its panels: variables, links, annotations, places on the grid, and ids that stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    GridPos,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.panels import SOURCE, Panel
from dashboards.queries import ROUTER

GRID_COLUMNS = 24
TAG = "transom"
VERSION = "transom_build_info"  # every process has this series, from its start on
VARIABLES = {  # name: how its values are found
    "model": f"label_values({VERSION}, model)",
    "worker": f'label_values({VERSION}{{model=~"$model",worker!=""}}, worker)',
    "router": f'label_values({VERSION}{{model=~"$model",router!=""}}, router)',
    "group": 'label_values(transom_kv_blocks{model=~"$model",worker=~"$worker"}, group)',
}


def firing(severity: str = ".*") -> str:
    """Our alerts that fire."""
    return f'ALERTS{{alertstate="firing",alertname=~"Transom.*",severity=~"{severity}"}}'


ANNOTATIONS = {  # name: (colour, query, labels that become tags)
    "Alerts": ("red", firing(), "alertname,severity,model,worker"),
    "Workers lost": (
        "orange",
        f'increase(transom_router_worker_changes_total{{{ROUTER},change="lost"}}[$__rate_interval]) > 0',
        "router",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard. `variables` are those that its panels use; the others are kept for the links, without being shown.

    `sections`: title -> panels, from left to right.
    """

    uid: str
    title: str
    description: str
    variables: frozenset[str]
    sections: Mapping[str, Sequence[Panel]]

    def build(self) -> dict[str, Any]:
        """As Grafana's JSON."""
        board = dashboard.Dashboard(f"Transom / {self.title}").uid(self.uid).description(self.description)
        board.tags([TAG]).editable().timezone("browser").time("now-1h", "now").refresh("10s")
        board.tooltip(DashboardCursorSync.CROSSHAIR).link(_links())
        board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        for name, values in VARIABLES.items():
            board.with_variable(_variable(name, values, is_hidden=name not in self.variables))
        top = 0
        for number, (title, panels) in enumerate(self.sections.items(), start=1):
            top = _place(board, title, panels, first_id=100 * number, top=top)
        built: dict[str, Any] = board.build().to_json()
        built["annotations"] = {"list": [_annotation(name, *rest) for name, rest in ANNOTATIONS.items()]}
        return built


def _place(board: dashboard.Dashboard, title: str, panels: Sequence[Panel], *, first_id: int, top: int) -> int:
    """Put a section on the grid; the first line below it. Ids count from the section's own, so that other sections may grow."""
    board.with_row(dashboard.Row(title).id(first_id).grid_pos(GridPos(h=1, w=GRID_COLUMNS, x=0, y=top)))
    left, line, height = 0, top + 1, 0
    for number, panel in enumerate(panels, start=1):
        size = panel.build().grid_pos
        assert size is not None  # every kind of panel sets its size
        if left + size.w > GRID_COLUMNS:
            left, line, height = 0, line + height, 0
        board.with_panel(panel.id(first_id + number).grid_pos(GridPos(h=size.h, w=size.w, x=left, y=line)))
        left, height = left + size.w, max(height, size.h)
    return line + height


def _links() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Transom").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.keep_time(True).include_vars(True)


def to_board(uid: str, title: str) -> dashboard.DashboardLink:
    """A panel's link to the dashboard that tells more, with the same time and variables."""
    url = f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}"
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(url)


def _variable(name: str, values: str, *, is_hidden: bool) -> dashboard.QueryVariable:
    """Several values at once, all by default. "All" is a pattern, so that it covers what starts after the page was loaded."""
    variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE)
    variable.query({"query": values, "refId": f"variable-{name}"}).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(".*")
    variable.current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable.hide(VariableHide.HIDE_VARIABLE if is_hidden else VariableHide.DONT_HIDE)


def _annotation(name: str, color: str, expr: str, tags: str) -> dict[str, Any]:
    """Written out, since the library knows only part of an annotation over Prometheus."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "step": "30s",
        "titleFormat": name,
        "textFormat": "",
        "tagKeys": tags,
        "useValueForTime": False,
    }
