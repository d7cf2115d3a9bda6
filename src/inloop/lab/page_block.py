"""The part of a page that a command writes, between ``<!-- table: COMMAND -->`` and ``<!-- end -->``."""

import re


def with_block(text: str, command: str, content: str) -> str:
    """The page ``text`` with ``content`` in the block of ``command``."""
    return re.sub(
        rf"(<!-- table: {re.escape(command)} -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{content}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
