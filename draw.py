"""
How analyze.py draws what its statistics have found: each drawing gets the statistic, {run: what was
found}, and {run: colour}, and returns a figure. What a drawing wants, `stat` in analyze.py says.
"""
import io
import itertools
import math

import matplotlib
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure   # not pyplot: a notebook keeps the backend that it has chosen
from matplotlib.ticker import EngFormatter, MaxNLocator

from inside import in_words

COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def colors_of(runs):
    """A colour for each run. The first PreNorm and the first NAG have the same on all pages."""
    found, free = {}, COLORS[2:] + COLORS[:2]
    for name, run in runs.items():
        own = {"pre": COLORS[0], "nag": COLORS[1]}.get(run.config["residual"].partition(":")[0])
        found[name] = own if own in free else free[0]
        free = [color for color in free if color != found[name]] or COLORS
    return found

def new_figure(panels, columns, size, **options):
    """-> a figure, and the axes of its panels. size: width and height of a panel, in inches"""
    columns = min(panels, columns)
    rows = math.ceil(panels / columns)
    width, height = max(5.6, size[0] * columns), size[1] * rows + 0.6
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options).flatten()
    for axes in grid[panels:]:
        axes.set_axis_off()
    return figure, grid[:panels]

def all_keys(dicts):
    """The keys of all of them, once each, in their order"""
    return list(dict.fromkeys(key for each in dicts for key in each))

def draw_lines(stat, results, colors):
    """A panel per group of lines. The colour says which run, the dashes which line."""
    how, titles = stat.options, all_keys(results.values())
    names = all_keys(group for result in results.values() for group in result.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = new_figure(len(titles), 3, (4.2, 3.2))
    for axes, title in zip(grid, titles):
        axes.set(xlabel=how["x"], ylabel=how.get("ylabel", title))
        if "ylabel" in how:
            axes.set_title(title)
        for run, result in results.items():
            for name, line in result.get(title, {}).items():
                if line and not isinstance(line[0], (list, tuple)):
                    line = list(enumerate(line, how.get("start", 1)))
                x, y = zip(*line) if line else ((), ())
                is_first_of_many = name == names[0] and len(names) > 1
                axes.plot(x, y, styles[name], color=colors[run], alpha=0.85,
                          lw=3 if is_first_of_many else 1.3, ms=10 if len(line) == 1 else 3.5)
        if "limits" in how:
            axes.set_ylim(how["limits"])
        if how.get("log") in (True, title):   # like a logarithm, but it goes through 0
            axes.set_yscale("asinh", linear_width=0.01)
            axes.yaxis.set_major_formatter(lambda y, _: "" if 0 < abs(y) < 0.01 else f"{y:g}")
        if how["x"].startswith("share"):
            axes.xaxis.set_major_formatter("{x:.0%}")
        elif axes.dataLim.x1 >= 1e4:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))   # 5M
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
    entries = {run: axes.plot([], [], color=colors[run], lw=3)[0] for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color="0.3", ms=3.5)[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def draw_heat(stat, results, colors):
    """A panel per run and matrix, the lowest number at the lower left"""
    how, found = stat.options, [(run, *each) for run in results for each in results[run].items()]
    figure, grid = new_figure(len(found), how.get("columns", 2), (4.6, 3.6))
    largest = max(x for *_, matrix in found for row in matrix for x in row if x is not None)
    for axes, (run, title, matrix) in zip(grid, found):
        image = heat(axes, matrix, **{"vmax": largest} | how)
        axes.set_title(f"{run} {title}", color=colors[run])
    figure.colorbar(image, ax=list(grid), label=how["label"])   # All panels have one scale.
    return figure

def heat(axes, matrix, x, y, vmax, first_row=1, first_column=1, lowest=None, cmap="viridis", **_):
    """A matrix as colours. None is grey, and a narrow one gets its numbers. lowest: the name
    of the lowest row"""
    values = torch.tensor([[math.nan if x is None else x for x in row] for row in matrix])
    rows, columns = values.shape
    xs, ys = range(first_column, first_column + columns), range(first_row, first_row + rows)
    image = axes.pcolormesh(xs, ys, values.numpy(), vmin=0, vmax=vmax, cmap=cmap)
    axes.set(xlabel=x, ylabel=y, facecolor="0.85")
    axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    if lowest:
        axes.set_yticks(ys, [lowest, *ys[1:]])
    if columns <= 16:
        axes.set_xticks(xs)
        for (row, column), value in zip(itertools.product(ys, xs), values.flatten().tolist()):
            if not math.isnan(value):
                *rgb, _ = image.cmap(image.norm(value))
                axes.text(column, row, short(value, vmax), ha="center", va="center", fontsize=7,
                          color="white" if sum(rgb) < 1.5 else "black")
    return image

def short(value, largest):
    """.73 for a share, and 12 for degrees"""
    return f"{value:.0f}" if largest > 2 else f"{value:.2f}".removeprefix("0")

def draw_inside(stat, results, colors):
    """Three panels per run: what can be read where the line stands, and where the answer is
    predicted, and one line's digits that can be read"""
    figure, grid = new_figure(3 * len(results), 3, (4.2, 3.4), width_ratios=[1, 1, 1.3])
    for i, (run, result) in enumerate(results.items()):
        line, answer, digits = grid[3 * i:3 * i + 3]
        labels = "the line after so many steps", "blocks run"
        heat(line, result["line"], *labels, first_row=0, first_column=0, vmax=1)
        heat(answer, result["answer"], *labels, first_row=0, first_column=0, vmax=1)
        line.set_title(f"{run}: share read where the line stands", color=colors[run])
        answer.set_title("share read where the answer is predicted")
        draw_digits(digits, result["examples"][0])
    return figure

def draw_digits(axes, example):
    """One line, a row a block: the furthest digits that can be read, coloured by steps"""
    blocks, n, most = example["blocks"], len(example["true"]), ord(example["line"][0]) - ord("a")
    for block, row in enumerate(blocks):
        if row is None:
            axes.text(n / 2, block, "nothing to be read yet", ha="center", va="center", color="0.5")
            continue
        color = matplotlib.colormaps["YlGnBu"](0.05 + 0.55 * row["steps"] / max(1, most))
        axes.barh(block, n, left=-0.5, height=1, color=color)
        for x, (digit, true) in enumerate(zip(row["digits"], row["true"])):
            color = "black" if digit == true else "red"
            axes.text(x, block, digit, ha="center", va="center", color=color)
        says = in_words(row["steps"])
        if row["where"] == "line":
            says += ", in the line"
        axes.text(n - 0.2, block, says, va="center", fontsize=9)
    axes.set(title=f"{example['line']}: the furthest digits that can be read", xlim=(-0.5, n + 5),
             ylim=(-0.5, len(blocks) - 0.5), xticks=range(n), xticklabels=example["answer"])
    axes.set_xlabel("the model's answer", loc="left")
    axes.spines[["top", "right", "bottom"]].set_visible(False)

def draw_bars(stat, results, colors):
    """A panel per group of bars; a bar per name and run"""
    titles = all_keys(results.values())
    names = all_keys(result[titles[0]] for result in results.values())
    size, thickness = (4.6, 0.25 * len(names) * (1 + len(results)) + 0.5), 0.8 / len(results)
    figure, grid = new_figure(len(titles), 2, size, sharey=True)
    for axes, title in zip(grid, titles):
        for i, (run, result) in enumerate(results.items()):
            values = [result[title].get(name, math.nan) for name in names]
            places = [row + i * thickness for row in range(len(names))]
            bars = axes.barh(places, values, thickness, color=colors[run], label=run)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        middle = 0.4 - thickness / 2
        axes.set_yticks([row + middle for row in range(len(names))], names)
        axes.set_title(title)
        axes.margins(x=0.15)
    axes.invert_yaxis()
    entries = axes.get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def draw_depth_map(stat, results, colors):
    """A heat map per run, of what was not skipped, with the tokens below"""
    maps = {run: {"": [[angle if ran else None for angle, ran in zip(*rows)]
                       for rows in zip(result["degrees"], result["ran"])]}
            for run, result in results.items()}
    figure = draw_heat(stat, maps, colors)
    figure.set_figwidth(12)
    for axes, result in zip(figure.axes, results.values()):
        image = axes.collections[0]
        image.set_norm(PowerNorm(0.5, *image.get_clim()))   # so that small angles differ, too
        tokens = [repr(token)[1:-1].replace("\\n", "↵") for token in result["tokens"]]
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "inside": draw_inside, "bars": draw_bars,
            "depth_map": draw_depth_map}   # and "table", which the page draws itself

def as_png(stat, found, colors):
    """-> bytes of a figure, and its width in inches"""
    png = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):   # A $ is part of a name, or of a text.
        figure = DRAWINGS[stat.draw](stat, found, colors)
        figure.savefig(png, format="png", dpi=130)
    return png.getvalue(), figure.get_figwidth()
