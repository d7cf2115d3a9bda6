"""What the paper's experiments need and the library does not.

``data`` and ``networks`` go into ``splits`` (the paper's split experiment), ``augmentation`` (its augmentation experiment) and ``bench``
(what a step costs). ``runs`` keeps what the two experiments find, ``report_page`` shows it.
"""
