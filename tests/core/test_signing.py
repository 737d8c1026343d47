from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.signing import Algorithm, Key, Keyring, canonical, read_key, read_stored_key
from duly.errors import Malformed

ONE = Key(Algorithm.ED25519, secret=bytes(range(32)))
TWO = Key(Algorithm.ED25519, secret=bytes(range(1, 33)))
SHARED = Key(Algorithm.HMAC, secret=bytes(range(32)))

FIELDS = st.lists(st.binary(max_size=9) | st.text(max_size=9) | st.integers(), max_size=6)


def as_bytes(field: str | bytes | int) -> bytes:
    return field if isinstance(field, bytes) else str(field).encode()


@given(FIELDS, FIELDS)
def test_different_fields_never_have_the_same_canonical_bytes(
    a: list[str | bytes | int], b: list[str | bytes | int]
) -> None:
    same = [as_bytes(f) for f in a] == [as_bytes(f) for f in b]
    assert (canonical(a) == canonical(b)) is same


@pytest.mark.parametrize("key", [ONE, SHARED], ids=["ed25519", "hmac"])
def test_a_signature_fits_its_own_bytes_and_key_alone(key: Key) -> None:
    signature = key.signer(b"open the door")
    assert key.verifier(signature, b"open the door")
    assert not key.verifier(signature, b"open the safe")
    assert not key.verifier(signature[:-1], b"open the door")
    assert not key.verifier(b"", b"open the door")
    assert not TWO.verifier(signature, b"open the door")


def test_ed25519_is_the_standards() -> None:
    # RFC 8032, section 7.1, test 2.
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    key = Key(Algorithm.ED25519, secret=secret)
    assert key.public.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.signer(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_hmac_is_the_standards() -> None:
    # What `printf hello | openssl dgst -sha256 -mac HMAC -macopt hexkey:000102…1f` says.
    assert SHARED.signer(b"hello").hex() == "53c40272a70c15ca4ee0af4df1f155fd6c41e00ce2307d8987ecd4bb36a7e990"


def test_a_public_key_is_shown_and_read_again_and_only_verifies() -> None:
    public = read_key(f" {ONE.shown}\n")
    assert (public.kid, public.secret) == (ONE.kid, b"")
    assert public.verifier(ONE.signer(b"x"), b"x")
    with pytest.raises(Malformed, match="cannot sign"):
        public.signer(b"x")


@pytest.mark.parametrize(
    "text", ["", "ed25519:", "ed25519:AAAA", "ed25519:!", "rsa:AAAA", "hmac-sha256:" + "A" * 43 + "=", "AAAA"]
)
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_key(text)


def test_an_hmac_key_has_no_public_half() -> None:
    with pytest.raises(Malformed, match="no public half"):
        Key(Algorithm.HMAC, public=ONE.public, secret=SHARED.secret)


def test_no_secret_is_ever_printed() -> None:
    ring = Keyring("A", own=ONE).trust("B", SHARED)
    for shown in (repr(ring), str(ONE), SHARED.shown, ONE.shown):
        assert ONE.secret.hex()[:16] not in shown
        assert "secret=" not in shown
    assert SHARED.shown == "hmac-sha256 (secret)"


def test_a_key_id_depends_on_the_key_and_the_algorithm() -> None:
    assert len({ONE.kid, TWO.kid, SHARED.kid}) == 3
    lied = msgspec.json.decode(b'{"algorithm":"hmac-sha256","secret":"%b","kid":"mine"}' % (b"A" * 43 + b"="),
                               type=Key)  # fmt: skip
    assert lied.kid not in ("mine", "")


def test_halves_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(Malformed, match="two halves"):
        Key(Algorithm.ED25519, public=TWO.public, secret=ONE.secret)


def test_a_key_is_believed_for_the_username_it_was_trusted_for_only() -> None:
    ring = Keyring("A").trust("B", ONE).trust("B", TWO).trust("C", TWO)
    assert ring.believed.keys() == {("B", ONE.kid), ("B", TWO.kid), ("C", TWO.kid)}
    assert ring.forget("B", ONE.kid).believed.keys() == {("B", TWO.kid), ("C", TWO.kid)}
    assert ring.forget("B").believed.keys() == {("C", TWO.kid)}
    assert Keyring("A", own=ONE).believed.keys() == {("A", ONE.kid)}


def test_trusting_keeps_no_secret_but_a_shared_one() -> None:
    ring = Keyring("A").trust("B", ONE).trust("C", SHARED)
    assert [bool(p.key.secret) for p in ring.peers] == [False, True]


def test_the_newest_secret_shared_with_a_user_signs_for_it() -> None:
    newer = Key(Algorithm.HMAC, secret=bytes(32))
    ring = Keyring("A", own=ONE).trust("B", SHARED).trust("B", newer).trust("C", TWO)
    assert ring.shared == {"B": newer}


def test_a_keyring_survives_being_written_down() -> None:
    ring = Keyring("A", own=ONE).trust("B", SHARED).trust("C", TWO)
    again = msgspec.json.decode(msgspec.json.encode(ring), type=Keyring)
    assert again == ring


@pytest.mark.parametrize("key", [ONE.trusted, SHARED], ids=["ed25519", "hmac"])
def test_a_key_is_read_as_it_was_stored(key: Key) -> None:
    assert read_stored_key(key.stored) == key
