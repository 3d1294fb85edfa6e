"""Named arrays as bytes: a decoder ends in arrays or an error, within what the bytes warrant."""
