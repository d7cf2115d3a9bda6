"""The block of a page that a command writes, between ``<!-- table: COMMAND -->`` and ``<!-- end -->``."""

import re


def with_block(text: str, command: str, content: str) -> str:
    """The page ``text`` with ``content`` in the block of ``command``; intervals and pairs of numbers do not break."""
    content = re.sub(r"(?<=\d) ([±/]) (?=-?\d)", "\u00a0\\1\u00a0", content)
    return re.sub(
        rf"(<!-- table: {re.escape(command)} -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{content}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
