"""Draws images/wirings.svg, four ways to wire a layer: python images/wirings.py

Depth goes downward, as in analyze.py. Only the standard library is needed.
"""

import math
from pathlib import Path

STREAM, SUBLAYER, TEXT, GREY = "#0072b2", "#d55e00", "#222222", "#999999"
WIDTH, HEIGHT = 240, 420   # of a panel

def line(x1, y1, x2, y2, color=STREAM, width=3.0, arrow=False, dashed=False):
    end = f' marker-end="url(#arrow-{color[1:]})"' if arrow else ""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            f'stroke-width="{width:.1f}"{end}{dash}/>')

def text(x, y, words, size=14, color=TEXT, anchor="middle", weight="normal"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{words}</text>')

def box(x, y, words, width=64):   # a sublayer, centered at x, y
    corner = f'x="{x - width / 2}" y="{y - 16}" width="{width}" height="32" rx="6"'
    return (f'<rect {corner} fill="white" stroke="{SUBLAYER}" stroke-width="2.5"/>'
            + text(x, y + 5, words))

def circle(x, y, words="", radius=11, color=STREAM, fill="white"):
    drawn = f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}" stroke="{color}" stroke-width="2.5"/>'
    return drawn + (text(x, y + 6, words, size=18, color=color) if words else "")

def panel(i, title, who, parts, caption):
    head = text(WIDTH / 2, 24, title, size=17, weight="bold") + text(WIDTH / 2, 44, who, size=13)
    foot = "".join(text(WIDTH / 2, HEIGHT - 28 + 18 * row, words, size=13)
                   for row, words in enumerate(caption))
    return f'<g transform="translate({i * WIDTH}, 0)">{head}{"".join(parts)}{foot}</g>'

SUBLAYERS = [(140, "attention"), (260, "MLP")]

def prenorm():
    x, right = 70, 165
    parts = [text(x, 76, "embedding", 13), line(x, 84, x, 338, arrow=True), text(x, 358, "head", 13)]
    for y, name in SUBLAYERS:
        parts += [line(x, y - 35, right, y - 35, width=2), line(right, y - 35, right, y - 18, width=2,
                                                                arrow=True),
                  line(right, y + 16, right, y + 45, SUBLAYER, 2),
                  line(right, y + 45, x + 13, y + 45, SUBLAYER, 2, arrow=True),
                  circle(x, y + 45, "+"), box(right, y, name, 80)]
    return parts

def attnres():
    x, right, rows = 50, 175, [90, 160, 230, 300]
    parts = [text(x - 4, 76, "embedding", 13)]
    weights = {1: [1.0], 2: [0.7, 0.3], 3: [0.45, 0.15, 0.4]}
    for reader, shares in weights.items():
        y = rows[reader] - 35
        for source, share in enumerate(shares):
            parts.append(line(x + 9, rows[source] + 2, right - 42, y - 6, width=0.8 + 5 * share))
        parts += [line(right - 40, y + 8, x + 11, rows[reader] - 1, SUBLAYER, 2, arrow=True),
                  box(right, y, ["attention", "MLP", "attention"][reader - 1], 80)]
    parts += [circle(x, y, radius=8, color=SUBLAYER if i else STREAM, fill="#eeeeee")
              for i, y in enumerate(rows)]
    return parts + [text(x, 330, "...", 16)]

def streams():
    lanes, right = [30, 58, 86, 114], 188
    parts = [text(72, 76, "embedding, n times", 13)]
    parts += [line(x, 84, x, 338, arrow=True, width=2.5) for x in lanes]
    for y, name in SUBLAYERS:
        for x, width in zip(lanes, [1.0, 3.5, 1.0, 1.8]):
            parts.append(line(x, y - 38, right - 22, y - 14, width=width))
        for x, width in zip(lanes, [2.5, 1.0, 1.8, 4.0]):
            parts.append(line(right - 22, y + 14, x + 5, y + 44, SUBLAYER, width, arrow=width > 2))
        parts += [f'<rect x="20" y="{y - 12}" width="104" height="24" rx="4" fill="#eef5fa" '
                  f'stroke="{STREAM}"/>', text(72, y + 5, "mix", 13), box(right, y, name, 80)]
    return parts + [text(72, 358, "head", 13)]

def nag():
    x, y, radius = 50, 286, 180
    def point(degrees, r):
        return x + r * math.cos(math.radians(degrees)), y - r * math.sin(math.radians(degrees))
    circle_points = " ".join("{:.1f},{:.1f}".format(*point(d, radius)) for d in range(28, 96))
    parts = [f'<polyline points="{circle_points}" fill="none" stroke="{GREY}" '
             f'stroke-dasharray="3 4"/>']
    for degrees, color in [(85, STREAM), (45, SUBLAYER), (40, GREY)]:
        parts.append(line(x, y, *point(degrees, radius - 2), color, arrow=True,
                          dashed=color == GREY))
    (x1, y1), (x2, y2) = point(84, 90), point(47, 90)
    parts.append(f'<path d="M {x1:.1f} {y1:.1f} A 90 90 0 0 1 {x2:.1f} {y2:.1f}" fill="none" '
                 f'stroke="{TEXT}" stroke-width="1.5" marker-end="url(#arrow-{TEXT[1:]})"/>')
    labels = [(66, 98, "x", STREAM), (90, 184, "40°", TEXT), (180, 128, "after the", SUBLAYER),
              (180, 144, "attention", SUBLAYER), (188, 226, "after the MLP:", "#666666"),
              (188, 242, "5°, a token", "#666666"), (188, 258, "can skip this", "#666666"),
              (WIDTH / 2, 320, "the length of x is a number", TEXT),
              (WIDTH / 2, 336, "of its own", TEXT)]
    return parts + [text(*place, words, 13, color) for *place, words, color in labels]

def main():
    arrows = "".join(
        f'<marker id="arrow-{color[1:]}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="11" '
        f'markerHeight="11" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{color}"/></marker>'
        for color in (STREAM, SUBLAYER, TEXT, GREY))
    panels = [
        panel(0, "PreNorm", "GPT-2, Llama", prenorm(), ["add to one sum"]),
        panel(1, "Attention Residuals", "Kimi K3", attnres(),
              ["keep all outputs, read a", "weighted mean of them"]),
        panel(2, "Several streams", "DeepSeek-V4, Qwen3.8-Next", streams(),
              ["read a mixture,", "write to each stream"]),
        panel(3, "NAG", "arXiv:2606.16112", nag(), ["rotate x, by an angle that", "is known in advance"]),
    ]
    Path(__file__).with_suffix(".svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {4 * WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif"><defs>{arrows}</defs>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n')

if __name__ == "__main__":
    main()
