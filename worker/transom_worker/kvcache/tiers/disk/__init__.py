"""The disk tier's files: KV blocks, named by digest and checked when they are read, within a limited space. No torch.

block_file     one block in a file: header, checksum, contents
folder         where the files of a rank's blocks lie
listing        which blocks have files
space          the space that all processes of a host share, and which files leave it first
"""
