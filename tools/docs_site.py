"""MkDocs hooks: add the files outside docs/ that pages link to, and adapt their links to the layout of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "runs/README.md", "examples/*"]


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ at their path in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between docs/ and the rest of the repository: on the site, docs/ is the root."""
    source = page.file.src_uri
    if source in OUTSIDE:
        return re.sub(r"\]\((\.\./)?docs/", r"](\1", markdown)
    return markdown if "/" in source else markdown.replace("](../", "](")
