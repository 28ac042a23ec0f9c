"""The comparison of a text's last tokens with earlier ones, which the lookups of drafts share."""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def matched_before(searched, place, text, length, longest):
    """Return how many tokens of `searched` before each place equal the last ones of a text, at most
    `longest`; 0 for places that are not before `length`. It stops once none is equal."""
    matched = tl.zeros_like(place)
    is_equal = place < length
    back = 1
    goes_on = back <= longest
    while goes_on:
        wanted = tl.load(text + tl.maximum(length - back, 0))
        is_equal = is_equal & (place >= back)
        found = tl.load(searched + place - back, mask=is_equal, other=-1)
        is_equal = is_equal & (found == wanted)
        matched += is_equal.to(tl.int32)
        back += 1
        goes_on = (back <= longest) & (tl.max(is_equal.to(tl.int32), 0) > 0)
    return matched
