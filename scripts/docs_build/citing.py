"""How to cite lens_rope, and the sources of its definitions: both from CITATION.cff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CITATION = Path(__file__).parents[2] / "CITATION.cff"

# Where the mathematics of each source is used, by the end of its address.
USED_AT = {
    "2104.09864": "rotation",
    "2309.00071": "rotation",
    "2503.01832": "bounds",
    "2309.17453": "sink-share",
    "2410.10781": "sink-share",
    "2209.11895": "patterns",
    "2211.00593": "patterns",
    "2410.06205": "head-metrics",
    "2609.39929": "head-metrics",
}


def load() -> dict[str, Any]:
    """The content of CITATION.cff."""
    return yaml.safe_load(CITATION.read_text(encoding="utf-8"))


def apa(citation: dict[str, Any]) -> str:
    """The software as the American Psychological Association's style has it."""
    year = str(citation["date-released"])[:4] if "date-released" in citation else "n.d."
    authors = ", & ".join(_name(author) for author in citation["authors"])
    title = f"{citation['title']} (Version {citation['version']}) [Computer software]"
    return f"{authors}. ({year}). {title}."


def bibtex(citation: dict[str, Any]) -> str:
    """The software as a BibTeX entry."""
    # An organisation in braces of its own is not taken apart into first and last names.
    authors = " and ".join(
        f"{{{_name(author)}}}" if "name" in author else _name(author)
        for author in citation["authors"]
    )
    fields = {
        "author": authors,
        "title": f"{{{citation['title']}}}",
        "version": citation["version"],
        "license": citation["license"],
    }
    if "date-released" in citation:
        fields["year"] = str(citation["date-released"])[:4]
    lines = [
        f"  {key} = {{{str(value).replace('_', chr(92) + '_')}}}," for key, value in fields.items()
    ]
    return "\n".join(["@software{lens_rope,", *lines, "}"])


def source(reference: dict[str, Any]) -> str:
    """One source in a line of Markdown: authors, year, title, address, and what it is used for.

    Raises:
        KeyError: `USED_AT` does not say where.
    """
    names = [author.get("family-names") or author["name"] for author in reference["authors"]]
    if len(names) > 3:
        authors = f"{names[0]} et al."
    elif len(names) > 1:
        authors = f"{', '.join(names[:-1])} and {names[-1]}"
    else:
        authors = names[0]
    number = reference["url"].rpartition("/")[2]
    notes = reference["notes"]
    return (
        f"- {authors} ({reference['year']}). *{reference['title']}*. "
        f"[arXiv {number}]({reference['url']}). For [{notes}](mathematics.md#{USED_AT[number]})."
    )


def markdown() -> str:
    """Both forms of the citation, and the sources."""
    citation = load()
    sources = "\n".join(source(reference) for reference in citation["references"])
    return f"""## As text

> {apa(citation)}

## As BibTeX

```text
{bibtex(citation)}
```

## Sources of definitions

If your work rests on one of these, cite the source as well.

{sources}"""


def _name(author: dict[str, Any]) -> str:
    return author.get("name") or f"{author['family-names']}, {author['given-names']}"
