"""The experiments on inloop: what they need and the library does not.

``data`` and ``networks`` go into ``splits`` (the paper's split experiment), ``augmentation`` (its augmentation experiment) and ``bench``
(what a step costs). ``runs`` keeps what the two experiments find, ``report_sections`` shows it on the page of ``inloop report``, and
``commands`` adds ``inloop run`` and ``inloop bench`` to the command line.
"""
