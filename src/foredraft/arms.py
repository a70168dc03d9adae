"""Who drafts: what is known of each part of `auto`, across requests and on this text.

A part is asked every round while it is worth its time, else now and then: such trials take a small share of a plain
step in the mean, and less while they stay useless. `deciding_kernels` reads and writes the rows, round by round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.deciding_kernels import ARM, TURN

_FIRST_WORTH = 0.3


def new_arms(costly: Sequence[bool], usual: Sequence[float]) -> NDArray[Any]:
    """`[P]` rows for the parts across requests, with these fields:

    - `costly`: Whether it runs a model: then it is asked for as many tokens as pay, if any.
    - `usual`: Acceptance of its tokens before anything was seen here: what `tune` found, if it did.
    - `asking`, `watching`: Seconds of a draft, and of learning from a verification; robust to interruptions.
    - `worth`: Tokens that it gains a round, verification paid, where the others leave the next token open; the first
      guess of a new request.
    - `asked`, `watched`, `spent`: How often it did either, and seconds of both together.
    - `verified`, `accepted`: Nodes, each counted in part where several proposed it.
    - `foreseen`: Tokens of the text that it had right, whether or not they were verified.
    - `idle`: Trials in a row that were of no use.
    - `drafts`, `beginning`, `step`: Of parts that run a model, sums over recent drafts, and by these the seconds that a
      draft takes to begin and for each step.
    - `records`: Tokens that were right, all tokens, and the round of the last; old ones fade. Of all rounds, then of
      those after it had 0, 1 or 2, 3 to 7, more tokens in a row right.
    """
    arms = np.zeros(len(costly), dtype=ARM)
    arms["costly"], arms["usual"], arms["worth"] = costly, usual, _FIRST_WORTH
    return arms


def new_turns(arms: NDArray[Any], stops: Sequence[bool]) -> NDArray[Any]:
    """`[P]` rows for the same parts within one request, with these fields:

    - `stops`: Whether it runs a model and ends its draft by itself: then it is asked where what it usually gains pays.
    - `worth`, `records`: As across requests.
    - `open`: What the others left open of the next token, when it was asked last; 1 for those that are asked first.
    - `run`: Tokens in a row that it has had right; `context`: what that says, by number of the record.
    - `chance`: Of each token that it would draft now, by what it had right lately after runs like this one.
    - `rounds`, `asks`: Rounds of the request, and those in which it was asked.
    - `wait`: Rounds until it is tried again; `idle`: trials that were of no use.
    - `ran`, `steps`: The last round in which its model ran, and forwards of that.
    - `took`: Seconds of the draft of this round; `learned`: of learning since the last one, -1 if it did not.
    - `offered`: Nodes of the draft of this round; `awaited`: whether the text is yet to tell how right its draft was,
      and then `reached` and `deepest`, the depths of its last right node and of its last node.
    """
    turns = np.zeros(len(arms), dtype=TURN)
    turns["stops"], turns["open"] = stops, 1.0
    turns["worth"], turns["idle"], turns["learned"] = arms["worth"], arms["idle"], -1.0
    return turns
