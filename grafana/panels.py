"""How a panel of the dashboards is made.

A panel is a `Show`: what it shows, which queries, and what to do when it is red. Its description and the words for
"no data" follow from that, so no panel can lack them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

OVERVIEW, DETAIL = "kvsweep-overview", "kvsweep-rank"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
SELECT = 'job=~"$job",model_name=~"$model_name",instance=~"$instance",tp_rank=~"$tp_rank",dp_rank=~"$dp_rank"'
RANK = "job, instance, model_name, tp_rank, pp_rank, dp_rank"
RANK_LEGEND = "{{model_name}} {{instance}} tp{{tp_rank}} dp{{dp_rank}}"
Steps = Sequence[tuple[float | None, str]]
GREEN, AMBER, RED = "green", "orange", "red"
WHOLE_WIDTH = 24

UP_TO: dict[str, Steps] = {  # thresholds: green below the first value, red from the last
    "any": [(None, GREEN), (1, RED)],
    "budget": [(None, GREEN), (1.1, AMBER), (1.25, RED)],
    "slowdown": [(None, GREEN), (1.02, AMBER), (1.05, RED)],
    "targets": [(None, GREEN), (2, AMBER), (3, RED)],
    "slow entries": [(None, GREEN), (0.001, RED)],
}
DOWN_TO: dict[str, Steps] = {"coverage": [(None, RED), (0.5, AMBER), (0.8, GREEN)], "one": [(None, RED), (1, GREEN)]}
NEUTRAL: Steps = ((None, "blue"),)


@dataclass(frozen=True, kw_only=True)
class Show:
    """One panel.

    Attributes:
        kind: stat, lines, stacked, heatmap or table.
        title: what it is, in the words of the runbook.
        queries: legend -> PromQL; $S stands for the label matchers of the dashboard's variables.
        what: one sentence: what is shown.
        red: what to do when it is red or out of line.
        none: what "no data" means here, in words.
        unit: Grafana's unit id.
        steps: (from value, colour).
        words: value -> (text, colour) where a number stands for a state.
        names: series name -> colour where the name of the series is what is shown.
        width, height: in grid units, the dashboard is 24 wide.
    """

    kind: str
    title: str
    queries: Mapping[str, str]
    what: str
    red: str
    none: str = "No sweeper reports this"
    unit: str = "short"
    steps: Steps = NEUTRAL
    words: Mapping[int, tuple[str, str]] | None = None
    names: Mapping[str, str] | None = None
    width: int = 12
    height: int = 8

    @property
    def description(self) -> str:
        names = sorted(set(re.findall(r"kvsweep_\w+|ALERTS", " ".join(self.queries.values()))))
        metrics = ", ".join(f"`{re.sub('_bucket$|_sum$|_count$', '', name)}`" for name in names)
        return f"{self.what}\n\nMetric: {metrics}.\n\nWhen it is red or out of line: {self.red}"


def build_panel(show: Show) -> Any:
    """The SDK's builder of one panel."""
    kinds: dict[str, Callable[[], Any]] = {
        "stat": stat.Panel,
        "lines": timeseries.Panel,
        "stacked": timeseries.Panel,
        "heatmap": heatmap.Panel,
        "table": table.Panel,
    }
    panel = kinds[show.kind]()
    panel.title(show.title).description(show.description).datasource(SOURCE)
    panel.unit(show.unit).no_value(show.none).span(show.width).height(show.height)
    panel.thresholds(
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in show.steps])
    )
    if show.words:
        options = {
            str(value): models.ValueMappingResult(text=text, color=colour)
            for value, (text, colour) in show.words.items()
        }
        panel.mappings([models.ValueMap(options=options)])
    for name, colour in (show.names or {}).items():
        fixed = models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        panel.override_by_name(name, [fixed])
    for index, (legend, expression) in enumerate(show.queries.items()):
        query = prometheus.Dataquery().expr(expression.replace("$S", SELECT)).ref_id(chr(ord("A") + index))
        query.legend_format(legend)
        if show.kind in ("stat", "table"):
            query.instant()
        else:
            query.range()
        if show.kind == "table":
            query.format(PromQueryFormat.TABLE)
        if show.kind == "heatmap":
            query.format(PromQueryFormat.HEATMAP)
        panel.with_target(query)
    FINISH[show.kind](panel, show)
    return panel


def finish_stat(panel: Any, show: Show) -> None:
    panel.color_mode(common_models.BigValueColorMode.BACKGROUND).graph_mode(common_models.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    named = any("{{" in legend for legend in show.queries) and not show.words
    mode = common_models.BigValueTextMode
    panel.text_mode(mode.NAME if named else mode.VALUE_AND_NAME if len(show.queries) > 1 else mode.VALUE)


def finish_lines(panel: Any, show: Show) -> None:
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.line_width(1).show_points(common_models.VisibilityMode.NEVER).axis_soft_min(0)
    if show.steps is not NEUTRAL:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED))


def finish_stacked(panel: Any, show: Show) -> None:
    finish_lines(panel, show)
    panel.fill_opacity(40).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))


def finish_heatmap(panel: Any, show: Show) -> None:
    panel.calculate(False).color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64))
    panel.y_axis(heatmap.YAxisConfig().unit(show.unit).axis_placement(common_models.AxisPlacement.LEFT))
    panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LINEAR))
    panel.filter_values(heatmap.FilterValueRange().le(1e-9)).show_tooltip().hide_legend()


def finish_table(panel: Any, show: Show) -> None:
    """Join the queries on their labels and call each value column by its legend."""
    columns = {f"Value #{chr(ord('A') + index)}": legend for index, legend in enumerate(show.queries)}
    panel.show_header(True)
    hidden = {name: True for name in ("Time", "__name__", "alertstate", "Value")}
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": hidden, "indexByName": {}, "renameByName": columns}
        )
    )


FINISH: dict[str, Callable[[Any, Show], None]] = {
    "stat": finish_stat,
    "lines": finish_lines,
    "stacked": finish_stacked,
    "heatmap": finish_heatmap,
    "table": finish_table,
}


def rank_table(title: str) -> tuple[Show, Any]:
    """The table of ranks, whose rows lead to the rank's own dashboard."""
    show = Show(
        kind="table",
        title=title,
        queries={
            "up": f"max by ({RANK}) (kvsweep_up{{$S}})",
            "open findings": f"sum by ({RANK}) (kvsweep_findings_open{{$S}})",
            "coverage": f"sum by ({RANK}) (kvsweep_slots_fingerprinted{{$S}})"
            f" / (sum by ({RANK}) (kvsweep_slots_resident{{$S}}) > 0)",
            "oldest unverified": f"max by ({RANK}) (kvsweep_oldest_unverified_seconds{{$S}})",
            "last full pass": f"time() - max by ({RANK})"
            ' (kvsweep_last_pass_completed_timestamp_seconds{$S,kind="deep"})',
            "host budget used": f'max by ({RANK}) (kvsweep_budget_used_ratio{{$S,budget="host_duty"}})',
        },
        what="One row a rank: is it swept, is anything corrupt, how far does the verification reach.",
        red="click the instance: it opens the rank's own dashboard.",
        none="No sweeper reports: none runs, or Prometheus does not scrape it",
        width=WHOLE_WIDTH,
    )
    panel = build_panel(show)
    value = models.DynamicConfigValue
    looks: dict[str, tuple[str, Steps]] = {
        "up": ("short", DOWN_TO["one"]),
        "open findings": ("short", UP_TO["any"]),
        "coverage": ("percentunit", DOWN_TO["coverage"]),
        "oldest unverified": ("s", NEUTRAL),
        "last full pass": ("s", NEUTRAL),
        "host budget used": ("percentunit", UP_TO["budget"]),
    }
    for column, (unit, steps) in looks.items():
        properties = [value(id_val="unit", value=unit)]
        if steps is not NEUTRAL:
            stops = [{"value": at, "color": colour} for at, colour in steps]
            properties += [
                value(id_val="thresholds", value={"mode": "absolute", "steps": stops}),
                value(id_val="custom.cellOptions", value={"type": "color-background"}),
            ]
        panel.override_by_name(column, properties)
    variables = {"job": "job", "model_name": "model_name", "instance": "instance", "tp_rank": "tp_rank"}
    chosen = "&".join(f"var-{name}=${{__data.fields.{field}}}" for name, field in variables.items())
    url = f"/d/{DETAIL}?${{__url_time_range}}&var-datasource=${{datasource}}&{chosen}"
    panel.override_by_name("instance", [value(id_val="links", value=[{"title": "Rank detail", "url": url}])])
    return show, panel
