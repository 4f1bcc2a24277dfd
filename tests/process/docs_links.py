# Every relative link of the pages leads to a file or folder that exists, and charts show the rows that were measured.
# builds: release
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
broken = []
for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "lockstep/README.md"]:
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        for link in [] if code else re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", line):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}:{number}: {link}")
charts = subprocess.run([sys.executable, ROOT / "bench/charts.py", "--check"])
print("\n".join(broken) or "all links lead somewhere")
sys.exit(1 if broken or charts.returncode else 0)
