"""
How analyze.py draws what its statistics have found, and makes a page of it. Each drawing gets
results, {run: what is drawn of it}, and colors, {run: colour}, and returns a figure. Its other
keywords are what stands in @stat(...). A line is [y, ...] or [[x, y], ...]. A matrix is a list of
rows, the lowest first, and None in it is grey.
"""
import base64
import io
import itertools
import json
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure   # not pyplot: a notebook keeps the backend that it has chosen
from matplotlib.ticker import MaxNLocator

from files import write_file, write_text
from model import flops_per_token, num_params

# Colours of Okabe and Ito, which the colour-blind can tell apart, too, and two more
COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def new_figure(n_panels, panels_a_row, panel_size):
    """-> a figure, and the axes of its panels. panel_size: width and height, in inches"""
    columns = min(n_panels, panels_a_row)
    rows = math.ceil(n_panels / columns)
    width, height = panel_size
    size = max(5.6, width * columns), height * rows + 0.6   # 0.6: room for a legend
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[n_panels:]:
        axes.set_axis_off()
    return figure, grid[:n_panels]

# ------------------------------------------------------------------------------------------- lines

def all_keys(dicts):
    """The keys of all of them, once each, in their order"""
    return list(dict.fromkeys(key for each in dicts for key in each))

def x_and_y(line, first_x):
    """[[x, y], ...], or [y, ...] that begins at first_x -> all x, and all y"""
    if line and isinstance(line[0], list):
        return zip(*line)
    return range(first_x, first_x + len(line)), line

def draw_lines(results, colors, x="", y="", first_x=1, share_x=False, share_y=False, asinh=False):
    """{panel: {name: line}} of each run. The colour says which run, the dashes which line.

    x, y: names of the axes (without y, the panel's name); first_x: where [y, ...] begins; share_x,
    share_y: values are between 0 and 1; asinh: y grows as in a logarithm, but goes through 0"""
    titles = all_keys(results.values())
    names = all_keys(panel for panels in results.values() for panel in panels.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = new_figure(len(titles), 3, (4.2, 3.2))
    for axes, title in zip(grid, titles):
        for run, panels in results.items():
            for name, line in panels.get(title, {}).items():
                xs, ys = x_and_y(line, first_x)
                size = 10 if len(ys) == 1 else 4   # A small single point would be overlooked.
                axes.plot(xs, ys, styles[name], color=colors[run], alpha=0.85, lw=1.6, ms=size)
        axes.set(xlabel=x, ylabel=y or title)
        if y:
            axes.set_title(title)
        axes.grid(alpha=0.25)
        if share_x:
            axes.xaxis.set_major_formatter("{x:.0%}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if share_y:
            axes.set_ylim(-0.03, 1.03)
        if asinh:
            axes.set_yscale("asinh", linear_width=0.01)
            axes.yaxis.set_major_formatter(tick_label)
    # What the legend shows: a thick line for each run, and a grey one for each kind of line. (They
    # are drawn nowhere: they have no points.)
    entries = {run: axes.plot([], [], color=colors[run], lw=3)[0] for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color="0.3", ms=4)[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def tick_label(value, position):
    """The numbers next to 0 would overlap, so we leave them out."""
    return "" if 0 < abs(value) < 0.01 else f"{value:g}"

# ----------------------------------------------------------------------------------------- matrices

def draw_heat(results, colors, **options):
    """A matrix of each run. options: those of draw_matrices"""
    figure, _ = draw_matrices([(run, colors[run], results[run]) for run in results], **options)
    return figure

def draw_matrices(panels, x="", y="", first_x=1, first_y=1, label="", share=False, power=1,
                  panels_a_row=2):
    """Numbers as colours -> a figure, and the axes of its panels. panels: [(title, colour of the
    title, matrix), ...]. A matrix with few columns has its numbers.

    x, y: names of the axes; first_x, first_y: where they begin; label: what the numbers are; share:
    they go to 1; power: 0.5 makes small numbers differ, too"""
    matrices = [np.array(matrix, dtype=float) for *_, matrix in panels]   # None becomes nan.
    # All panels have one scale.
    largest = 1 if share else max(np.nanmax(matrix, initial=0) for matrix in matrices)
    figure, grid = new_figure(len(panels), panels_a_row, (4.6, 3.6))
    for axes, (title, color, _), matrix in zip(grid, panels, matrices):
        rows, columns = matrix.shape
        # The middles of its cells have whole numbers.
        extent = first_x - 0.5, first_x + columns - 0.5, first_y - 0.5, first_y + rows - 0.5
        image = axes.imshow(matrix, origin="lower", extent=extent, aspect="auto",
                            cmap="viridis" if share else "Blues", interpolation="nearest",
                            norm=PowerNorm(power, 0, largest))
        axes.set(xlabel=x, ylabel=y, facecolor="0.85")   # Where there is no number, it is grey.
        axes.set_title(title, color=color)
        axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
        if columns <= 16:
            axes.set_xticks(range(first_x, first_x + columns))
            for (row, column), value in np.ndenumerate(matrix):
                write_number(axes, first_x + column, first_y + row, value, image, share)
    figure.colorbar(image, ax=list(grid), label=label)
    return figure, grid

def write_number(axes, x, y, value, image, share):
    """A number in its cell: .73 for a share, and 12 for degrees"""
    if not math.isnan(value):
        red, green, blue, _ = image.cmap(image.norm(value))
        text = f"{value:.2f}".removeprefix("0") if share else f"{value:.0f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=7,
                  color="white" if red + green + blue < 1.5 else "black")

def draw_lines_inside(results, colors):
    """What a probe reads: where the line stands, and where the answer is predicted"""
    panels = []
    for run, result in results.items():
        panels += [(f"{run}: where the line stands", colors[run], result["line"]),
                   (f"{run}: where the answer is predicted", colors[run], result["answer"])]
    figure, _ = draw_matrices(panels, x="the line after so many steps", first_x=0, y="blocks run",
                              first_y=0, label="share of digits read", share=True)
    return figure

def draw_depth_map(results, colors):
    """A column per token, with the tokens below"""
    panels = [(run, colors[run], result["degrees"]) for run, result in results.items()]
    figure, grid = draw_matrices(panels, x="token (grey: it skips)", y="sublayer", power=0.5,
                                 label="angle (degrees)", panels_a_row=1)
    figure.set_figwidth(12)
    for axes, result in zip(grid, results.values()):
        # repr writes a tab as '\t'. We leave its quotes out.
        tokens = [repr(token.replace("\n", "↵"))[1:-1] for token in result["tokens"]]
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "lines_inside": draw_lines_inside,
            "depth_map": draw_depth_map}

def as_png(statistic, results, colors):
    """-> bytes of a figure, and its width in inches"""
    png = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):   # A $ is part of a name, or of a text.
        figure = DRAWINGS[statistic.draw](results, colors, **statistic.options)
        figure.savefig(png, format="png", dpi=130)
    return png.getvalue(), figure.get_figwidth()

# ----------------------------------------------------------------------------------------- the page

def write_page(out, runs, statistics, found):
    """Writes figures, numbers and page to the folder `out`. runs: {name: Run}; statistics: {name:
    Statistic}; found: {name: dict}, see measure_all in analyze.py, where these classes are, too"""
    colors = dict(zip(runs, itertools.cycle(COLORS)))
    about = {name: dict(config=run.config, color=colors[name], loss=run.loss, bits=run.bits,
                        parameters=num_params(run.model), flops=flops_per_token(run.model))
             for name, run in runs.items()}
    entries, pngs = {}, {}
    for name, of_runs in found.items():
        statistic = statistics[name]
        entry = dict(title=statistic.title, caption=statistic.caption,
                     definition=statistic.definition, **of_runs)
        if statistic.draw and of_runs["results"]:
            png, inches = as_png(statistic, of_runs["results"], colors)
            entry["image"] = "data:image/png;base64," + base64.b64encode(png).decode()
            entry["width"] = 80 * inches   # in pixels of the page
            pngs[name] = png
        entries[name] = entry
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # JSON may write < as \u003c. So a </script> in a text doesn't end the script of the page.
    report = json.dumps(dict(runs=about, statistics=entries)).replace("<", "\\u003c")
    write_text(out / "index.html", template.replace("REPORT", report))
    numbers = dict(runs=about,
                   statistics={name: of_runs["results"] for name, of_runs in found.items()},
                   missing={name: of_runs["missing"] for name, of_runs in found.items()})
    write_text(out / "numbers.json", json.dumps(numbers, indent=1))
    for name, png in pngs.items():   # After the page: by it, analyze.py knows a folder as ours.
        write_file(out / f"{name}.png", lambda file: file.write(png))
