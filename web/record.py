"""Records the live page as an animated picture, for README: its scenes, one screenshot each.

    python web/record.py figures/play.html images/play.webp       # needs chromium

Needs the page of three runs: steps-pre, steps-nag and steps-attnres, in this order.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image   # comes with matplotlib

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-quic", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--hide-scrollbars", "--window-size=1280,716",
            "--force-device-scale-factor=0.75", "--virtual-time-budget=30000"]

# In each scene the page is loaded anew, and changed by this script; then it is shown for so long.
NAG = "change({ question: 2, model: MODELS[1] });"
SKIP = """(async () => {
  for (const degrees of [DEGREES]) {
    change({ threshold: Math.tan(degrees * Math.PI / 180) })
    await pause(1000)
  }
})()"""
SCENES = [
    ("", 2.5),
    ("switch_layers([6, 7])", 2.0),                      # block 3
    ("", 0.8),
    ("choose(15)", 1.2),
    ("choose(19)", 1.2),
    ("choose(23)", 1.5),
    ("change({ question: 1, steps: 1 })", 2.5),
    ("change({ question: 1, steps: 1 }); switch_layers([4, 5])", 2.0),   # block 2
    ("change({ question: 1 })", 2.0),
    ("change({ question: 1 }); switch_layers([4, 5])", 1.5),
    (NAG, 1.5),
    (NAG + SKIP.replace("DEGREES", "4, 8.4"), 1.5),
    (NAG + SKIP.replace("DEGREES", "4, 8.4, 12, 16"), 1.5),
    (NAG + SKIP.replace("DEGREES", "4, 8.4, 12, 16, 20, 25"), 2.0),
    ("change({ question: 1, model: MODELS[2] })", 2.5),
]
# the same random lines in each scene
SEED = "let seed = 7; Math.random = () => (seed = seed * 16807 % 2147483647) / 2147483647"

def screenshot(page, change, folder):
    html = page.replace("<script>", f"<script>{SEED}</script><script>", 1)
    html = html.replace("</body>", f"<script>{change}</script></body>")
    Path(folder, "page.html").write_text(html, encoding="utf-8")
    flags = [f"--screenshot={folder}/page.png", f"--user-data-dir={folder}/profile"]
    subprocess.run([*CHROMIUM, *flags, Path(folder, "page.html").as_uri()], check=True,
                   stderr=subprocess.DEVNULL)
    return Image.open(Path(folder, "page.png")).convert("RGB")

def main():
    page, out = sys.argv[1:]
    page = Path(page).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        frames = [screenshot(page, change, folder) for change, _ in SCENES]
    durations = [int(1000 * seconds) for _, seconds in SCENES]
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=durations, loop=0,
                   quality=70, method=6)
    size = Path(out).stat().st_size
    print(f"{out}: {len(frames)} frames of {frames[0].size}, {size / 1000:.0f} kB")

if __name__ == "__main__":
    main()
