"""Compare the training steps of a program in one layout with those in a reference (``ds-topo verify``).

A program runs three times: in the wanted layout, in the reference, and in the reference with artificial rounding
errors, which measure how large a difference may be. :mod:`ds_topo.verification.runs` starts the ranks,
:mod:`ds_topo.verification.recorder` writes what each rank computes, and :mod:`ds_topo.verification.comparison` finds
the first difference and its cause. Open ``runs`` first.
"""
