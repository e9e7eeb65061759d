"""Heal a converted model: a short training that brings its teacher's quality back.

    teacher ─┐                ┌─ local: each block against the teacher's state behind it
    student ─┼─ View (parts) ─┼─ global: task, logits, states; norms may move by degrees (tapers)
    data  ───┘                └─ control: the teacher on the same tokens  ─► Outcome

`session.heal` is the way in. A view is the captured graph cut behind every sum, on the captured module's own
parameters; nothing of it is in the result.
"""
