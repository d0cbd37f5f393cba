"""Walk the markers of a JPEG: is its picture whole?"""

from __future__ import annotations

# The second bytes of markers. Those of NO_SEGMENT stand alone: 0 is a byte of pixels, then TEM and
# the restart markers.
START = 0xD8
END = 0xD9
SCAN = 0xDA
FILL = 0xFF
NO_SEGMENT = (0x00, 0x01, *range(0xD0, 0xD8))
SEQUENTIAL_FRAMES = (0xC0, 0xC1)


def has_whole_picture(data: bytes) -> bool:
    """Return True if a marker ends the picture, behind at least one scan.

    Segments, which may have whole thumbnails, are passed over by their lengths.
    """
    position = 2
    num_components = 0
    has_scan = False
    while True:
        position = data.find(b"\xff", position)
        if not 0 <= position < len(data) - 1:
            # A marker needs a second byte.
            return False
        marker = data[position + 1]
        # Any number of fill bytes may stand before a marker.
        if marker == FILL:
            position += 1
            continue
        if marker in NO_SEGMENT:
            position += 2
            continue
        # A second start has no place here, and an end without a scan ends no picture.
        if marker in (START, END):
            return marker == END and has_scan

        if marker in SEQUENTIAL_FRAMES:
            num_components = int.from_bytes(data[position + 9 : position + 10])
        if marker == SCAN:
            has_scan = True
            # Coded pixels contain no end marker. So a picture in a single scan is whole if its file
            # ends with one: most are, and a search would take as long as reading them.
            num_in_scan = int.from_bytes(data[position + 4 : position + 5])
            if num_in_scan == num_components and data.endswith(b"\xff\xd9"):
                return True

        position += 2 + max(2, int.from_bytes(data[position + 2 : position + 4]))
