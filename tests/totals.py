"""Print one closing line, ``N passed, N failed, N skipped``, for several JUnit reports."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def main(reports: list[str]) -> int:
    """Add the reports up; return 1 if anything failed or nothing ran."""
    total = failed = skipped = 0
    for report in reports:
        for suite in ElementTree.parse(report).iter("testsuite"):
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    passed = total - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
