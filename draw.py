"""
How analyze.py draws what its statistics have found: each drawing gets the statistic, {run: what was
found}, and {run: colour}, and returns a figure. What a statistic has to return, RETURNS in
analyze.py says.
"""
import io
import itertools
import math
from types import SimpleNamespace

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure   # not pyplot: a notebook keeps the backend that it has chosen
from matplotlib.ticker import MaxNLocator

# The options of a statistic, with their defaults
OPTIONS = dict(
    x="", y="", first_x=1, first_y=1,   # names of the axes, and where they begin
    log=False,                          # of lines: a logarithm of y
    label="", cmap="viridis", power=1,  # of matrices: the scale of the colours
    columns=2)                          # of panels with matrices

# Colours of Okabe and Ito, which the colour-blind can tell apart, too, and two more
COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def options_of(stat):
    return SimpleNamespace(**OPTIONS | stat.options)

def is_share(name):
    """A share is between 0 and 1."""
    return name.startswith("share")

def colors_of(runs):
    """A colour for each run. The first PreNorm and the first NAG have the same on all pages."""
    found, free = {}, COLORS[2:] + COLORS[:2]
    for name, run in runs.items():
        own = {"pre": COLORS[0], "nag": COLORS[1]}.get(run.config["residual"].partition(":")[0])
        found[name] = own if own in free else free[0]
        free = [color for color in free if color != found[name]] or COLORS
    return found

def new_figure(panels, columns, size):
    """-> a figure, and the axes of its panels. size: width and height of a panel, in inches"""
    columns = min(panels, columns)
    rows = math.ceil(panels / columns)
    width, height = max(5.6, size[0] * columns), size[1] * rows + 0.6   # The rest is for a legend.
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[panels:]:
        axes.set_axis_off()
    return figure, grid[:panels]

# ------------------------------------------------------------------------------------------- lines

def draw_lines(stat, results, colors):
    """A panel per group of lines. The colour says which run, the dashes which line."""
    how, titles = options_of(stat), all_keys(results.values())
    names = all_keys(group for result in results.values() for group in result.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = new_figure(len(titles), 3, (4.2, 3.2))
    for axes, title in zip(grid, titles):
        for run, result in results.items():
            for name, line in result.get(title, {}).items():
                x, y = x_and_y(line, how.first_x)
                is_first_of_many = name == names[0] and len(names) > 1
                axes.plot(x, y, styles[name], color=colors[run], alpha=0.85,
                          lw=3 if is_first_of_many else 1.3, ms=10 if len(x) == 1 else 3.5)
        set_axes(axes, how, title)
    # What the legend shows: a thick line for each run, and a grey one for each kind of line
    entries = {run: axes.plot([], [], color=colors[run], lw=3)[0] for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color="0.3", ms=3.5)[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def set_axes(axes, how, title):
    """The axes of a panel with lines. Its title names y, if the options don't."""
    axes.set(xlabel=how.x, ylabel=how.y or title, title=title if how.y else "")
    axes.grid(alpha=0.25)
    if is_share(how.x):
        axes.xaxis.set_major_formatter("{x:.0%}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if is_share(how.y or title):
        axes.set_ylim(-0.03, 1.03)
    if how.log:   # like a logarithm, but it goes through 0
        axes.set_yscale("asinh", linear_width=0.01)
        axes.yaxis.set_major_formatter(lambda y, _: "" if 0 < abs(y) < 0.01 else f"{y:g}")

def all_keys(dicts):
    """The keys of all of them, once each, in their order"""
    return list(dict.fromkeys(key for each in dicts for key in each))

def x_and_y(line, first_x):
    """[[x, y], ...], or [y, ...] that begins at first_x -> x, y"""
    if not line or isinstance(line[0], list):
        return [x for x, _ in line], [y for _, y in line]
    return range(first_x, first_x + len(line)), line

# ----------------------------------------------------------------------------------------- matrices

def draw_heat(stat, results, colors):
    """A panel per run and matrix: numbers as colours, the first row lowest. None is grey. A matrix
    with few columns gets its numbers."""
    how = options_of(stat)
    found = [(run, title, np.array(matrix, dtype=float))   # None becomes nan.
             for run, panels in results.items() for title, matrix in panels.items()]
    largest = max(np.nanmax(matrix, initial=0) for *_, matrix in found)
    if is_share(how.label):
        largest = 1
    figure, grid = new_figure(len(found), how.columns, (4.6, 3.6))
    for axes, (run, title, matrix) in zip(grid, found):
        rows, columns = matrix.shape
        xs = how.first_x + np.arange(columns)
        ys = how.first_y + np.arange(rows)
        # A power of 0.5 makes small numbers differ, too. All panels have one scale.
        image = axes.pcolormesh(edges(xs), edges(ys), matrix, cmap=how.cmap,
                                norm=PowerNorm(how.power, 0, largest))
        axes.set(xlabel=how.x, ylabel=how.y, facecolor="0.85")
        axes.set_title(f"{run}: {title}" if title else run, color=colors[run])
        axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
        if columns <= 16:
            axes.set_xticks(xs)
            for (y, x), value in zip(itertools.product(ys, xs), matrix.flatten()):
                write(axes, x, y, value, image, largest)
    figure.colorbar(image, ax=list(grid), label=how.label)
    return figure

def edges(places):
    """Of cells whose middles are at these places"""
    return np.append(places, places[-1] + 1) - 0.5

def write(axes, x, y, value, image, largest):
    """A number in its cell: .73 for a share, and 12 for degrees"""
    if not math.isnan(value):
        red, green, blue, _ = image.cmap(image.norm(value))
        text = f"{value:.0f}" if largest > 2 else f"{value:.2f}".removeprefix("0")
        axes.text(x, y, text, ha="center", va="center", fontsize=7,
                  color="white" if red + green + blue < 1.5 else "black")

def draw_inside(stat, results, colors):
    """What a probe reads: where the line stands, and where the answer is predicted"""
    panels = {run: {"where the line stands": result["line"],
                    "where the answer is predicted": result["answer"]}
              for run, result in results.items()}
    return draw_heat(stat, panels, colors)

def draw_depth_map(stat, results, colors):
    """A column per token, with the tokens below"""
    panels = {run: {"": result["degrees"]} for run, result in results.items()}
    figure = draw_heat(stat, panels, colors)
    figure.set_figwidth(12)
    for axes, result in zip(figure.axes, results.values()):
        tokens = [repr(token)[1:-1].replace("\\n", "↵") for token in result["tokens"]]
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "inside": draw_inside,
            "depth_map": draw_depth_map}

def as_png(stat, found, colors):
    """-> bytes of a figure, and its width in inches"""
    png = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):   # A $ is part of a name, or of a text.
        figure = DRAWINGS[stat.draw](stat, found, colors)
        figure.savefig(png, format="png", dpi=130)
    return png.getvalue(), figure.get_figwidth()
