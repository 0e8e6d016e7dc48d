"""Code that preparing any corpus needs: downloads, sources of text, destinations, manifests and checksums."""
