"""The report's own words: what a reader needs before the first experiment, between two, and after the last."""

from __future__ import annotations

INTRODUCTION = """
A language model is a stack of **layers**, each of which works on what the one below it wrote. It writes one **token**
(a word or a piece of one) at a time. To choose the next token it looks back at the text so far: in every layer, the
newest token asks a question (its *query*), every earlier token holds up a label (its *key*), and the answer is a mix
of what those tokens carry (their *values*), each weighed by how well its label fits. That is **attention**. Keys and
values of the text so far are kept, so that they need not be computed again: this store is the **KV cache**, and with
ordinary attention, called **full**, it grows with every token, and so does the work of reading it.

**Sliding-window attention** makes one change: a token looks back at the last W tokens only, itself included. W is the
**window**. What has slid out of it can never be seen again in that layer, so it need not be kept: the cache of such a
layer stops growing, and so does its work per token. A **hybrid** model has both: most layers look through a window, a
few see everything. A **pure** window model has windows in every layer.

This report shows, by measurement on a real model, what that buys, what it costs, and what people get wrong about it.
It needs no other knowledge. Each chapter states a claim, shows figures, and says whether they support it.
"""

RULES = """
One rule decides everything: the token at position q sees the key at position k if k is at most q and more than q - W.
There are exactly W such keys. The rule is the same in the kernels that compute attention, in the tables that say
which memory may be used again, and in the formulas that predict bytes; the first chapter looks whether the kernels
really follow it.
"""

# Experiment to the sentences that lead over to it from the one before.
BRIDGES: dict[str, str] = {
    "edge": "First the promise itself.",
    "against": "So much for one layer. What do windows do to a whole model, and how can one tell right from wrong?",
    "ring-layer": """
What lies outside the window has no part in the answer, so its memory can be used again. The store that does this is
called a **ring**: rows take their places in turn, and when all are taken, the newest takes the place of the oldest.
""",
    "window-sweep": "So memory depends on the window alone, not on the length. Then why not make the window small?",
    "reach-toy": """
Each layer sees its window only. But layers stand on one another, and so news may travel from window to window.
""",
    "myth-mask": """
With this behind us, four sentences that are often heard about windows can be put to the test. Each chapter's claim is
what is right, and its verdict is about that.
""",
    "memory": """
So far this was about windows. The last chapters are about the engine around them: whether its own figures are true,
and what happens when prompts are long and requests are many.
""",
}

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("window W", "how many keys a token sees in a window layer, itself included"),
    (
        "full, window, hybrid, pure",
        "a layer that sees everything; one that sees W keys; a model with both; one with windows only",
    ),
    ("layer", "one of the stages of a model; each adds to what the one below hands up (the residual stream)"),
    ("kernel", "the piece of a program that computes attention"),
    ("KV cache", "keys and values of earlier tokens, kept so that they are not computed again"),
    (
        "pool, page",
        "memory for the KV cache of one kind of layer, and the fixed piece of it that is handed out at once",
    ),
    ("ring", "a store of fixed size in which the newest row takes the place of the oldest"),
    ("prefill, decode", "reading a prompt, many tokens at once; writing an answer, one token at a time"),
    ("greedy", "always taking the likeliest token, so that the same prompt gives the same answer"),
    ("float32, bfloat16", "ways to store numbers, in 4 bytes with 7 digits that count or in 2 bytes with 2 to 3"),
    (
        "perplexity",
        "how surprised a model is by a text: as if it had chosen among so many equally likely tokens; lower is better",
    ),
    ("MiB", "1,048,576 bytes"),
)
