"""What the paper's experiments need and the library does not.

``data`` and ``networks`` go into ``splits`` (section 5.1), ``augmentation`` (section 5.2) and ``bench`` (what a step costs); ``runs`` keeps
what they find; ``report_page`` shows it.
"""
