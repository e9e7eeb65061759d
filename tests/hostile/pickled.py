"""Pickles that would run something: each makes the marker folder where it is loaded without restraint."""

from __future__ import annotations

import struct


def payloads(marker: str) -> dict[str, bytes]:
    """Return hostile pickles by what they do."""
    path = marker.encode()
    text = b"X" + struct.pack("<I", len(path)) + path
    short = b"\x8c\x02os\x8c\x05mkdir\x93"
    call = b"cposix\nmkdir\n(" + text + b"tR."
    word = b"\x8c" + bytes([9])
    linear = b"ctorch.nn.modules.linear\nLinear\n"
    return {
        "a global": b"\x80\x02" + call,
        "a global of another name": b"\x80\x02cos\nmkdir\n(" + text + b"tR.",
        "a global from the stack": b"\x80\x04" + short + b"(" + text + b"tR.",
        "a global by memo": b"\x80\x04\x8c\x02os\x94\x8c\x05mkdir\x94\x30\x30h\x00h\x01\x93(" + text + b"tR.",
        "a global by a wrong memo": b"\x80\x04\x8c\x02os\x94\x30\x8c\x05mkdir\x94\x30h\x00h\x01\x93(" + text + b"tR.",
        "a global of dots": b"\x80\x04\x8c\x07pathlib\x8c\x08os.mkdir\x93(" + text + b"tR.",
        "an instance": b"(" + text + b"iposix\nmkdir\n.",
        "an object": b"\x80\x02(cposix\nmkdir\n" + text + b"o.",
        "a new object": b"\x80\x02cposix\nmkdir\n(" + text + b"t\x81.",
        "an extension": b"\x80\x02\x82\x01.",
        "eval": b"\x80\x02c__builtin__\neval\n(X" + _text(f"__import__('os').mkdir({marker!r})") + b"tR.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\nX" + _text("mkdir") + b"tR.",
        "a bytearray of 2^36": b"\x80\x02c__builtin__\nbytearray\n(\x8a\x06\0\0\0\0\x10\0tR.",
        "a layer called with sizes": b"\x80\x02" + linear + b"(J\0\x5a\x62\x02J\0\x5a\x62\x02tR.",
        "a layer without attributes": b"\x80\x02" + linear + b")\x81.",
        "a layer that a global builds": b"\x80\x02" + linear + b")\x81" + call + b"b.",
        "a layer's own forward": b"\x80\x02" + linear + b")\x81}X" + _text("forward") + linear + b"sb.",
        "a second pickle": b"\x80\x02}." + b"\x80\x02" + call,
        "text protocol": b"(dp0\n." + b"\x80\x02" + call,
        "torch's own loader": b"\x80\x02ctorch.serialization\nload\n(" + text + b"tR.",
        "torch.hub": b"\x80\x02ctorch.hub\nload\n(" + text + text + b"tR.",
        "numpy's own loader": b"\x80\x02cnumpy\nload\n(" + text + b"tR.",
        "a module of the folder": b"\x80\x02cpayload\nX\n.",
        "sys.modules": b"\x80\x02csys\nmodules\n" + word + b"payload__s0N.",
        "a persistent id": b"\x80\x02X" + _text("whatever") + b"Q.",
        "lists in lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "tuples in tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "doubling": b"\x80\x02]q\x00" + b"".join(b"(h\x00h\x00lq\x00" for _ in range(64)) + b".",
        "a string of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x",
        "bytes of 2^31": b"\x80\x04B" + struct.pack("<I", 0x7FFFFFFF) + b"x",
        "a number of 10^6 digits": b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.",
        "a frame that lies": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
        "memo of 2^32": b"\x80\x02}r\xff\xff\xff\xff.",
        "no end": b"\x80\x02}",
        "nothing but its protocol": b"\x80\x02",
        "an unknown operation": b"\x80\x02\xff.",
        "escape bytes as a name": b"\x80\x02c\x1b[31mred\x07\nmkdir\n.",
        "a name of 5000 letters": b"\x80\x02c" + b"x" * 5000 + b"\nmkdir\n.",
        "a name of right to left": b"\x80\x02c" + "\u202egnp.exe".encode() + b"\nmkdir\n.",
    }


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


PAYLOAD = "import os\nos.mkdir({marker!r})\nclass X:\n    a = 1\n"
"""A module that runs something when it is imported."""
