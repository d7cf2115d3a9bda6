"""HTML for reports: a self-contained page, tables, figures."""

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from inloop.atomic_files import write_atomically

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
h3 { font-size: 1rem; margin-top: 1.6rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, .text { text-align: left; } th { font-weight: 600; }
svg { max-width: 100%; min-width: 40rem; height: auto; } .bad { color: #c1272d; font-weight: 600; } .note { color: #666; font-size: .9rem; }
.warning { background: #fff4e0; border-left: 4px solid #e0a030; padding: .4rem .8rem; }
"""


def html_page(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are HTML already."""
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def html_figure(figure: Figure, path: Path) -> str:
    """The figure for the page; also written as ``path``.svg and ``path``.png."""
    svg = as_svg(figure)
    write_atomically(path.with_name(f"{path.name}.svg"), lambda file: file.write(svg.encode()))
    write_atomically(path.with_name(f"{path.name}.png"), lambda file: figure.savefig(file, format="png", dpi=150))
    return f'<div class="wide">{svg}</div>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def as_svg(figure: Figure) -> str:
    """The figure as SVG without a date or random ids, so that the same numbers give the same file."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "inloop", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
