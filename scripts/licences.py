#!/usr/bin/env python3
"""Checks the licence of every dependency against the list in deny.toml. Needs only cargo and Python."""
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def allowed_licences():
    text = (ROOT / "deny.toml").read_text()
    listed = re.search(r"^allow = \[(.*?)\]", text, re.MULTILINE | re.DOTALL).group(1)
    return set(re.findall(r'"([^"]+)"', listed))


def satisfied(expression, allowed):
    """Evaluates an SPDX expression: AND binds tighter than OR; the old slash means OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def either():
        result = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            result = both() or result
        return result

    def both():
        result = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            result = one() and result
        return result

    def one():
        name = tokens.pop(0)
        if name == "(":
            result = either()
            tokens.pop(0)
            return result
        if tokens and tokens[0] == "WITH":
            tokens.pop(0)
            name = f"{name} WITH {tokens.pop(0)}"
        return name in allowed

    return either()


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    allowed = allowed_licences()
    bad = [f"{package['name']} {package['version']}: {package['license'] or 'no licence given'}"
           for package in metadata["packages"]
           if not (package["license"] and satisfied(package["license"], allowed))]
    for line in bad:
        print(f"licence not allowed: {line}", file=sys.stderr)
    print(f"licences: {len(metadata['packages'])} packages, {len(bad)} not allowed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
