"""The experiments on inloop, and the code that only they need.

``data`` and ``networks`` go into ``splits`` (the paper's split experiment), ``augmentation`` (its augmentation experiment) and ``bench``
(the cost of a step). ``runs`` keeps the results of the two experiments, ``report_sections`` shows them on the page of ``inloop report``, and
``commands`` adds ``inloop run`` and ``inloop bench`` to the command line.
"""
