"""The disk tier's files: KV blocks, named by digest and checked when they are read, within a limited space. No torch.

folder           reads and writes the files of one rank's blocks: header, checksum, contents
listing          finds out which blocks have files
owned_directory  opens directories so that other users cannot redirect them
space            bounds the space that all processes of a host use together, and removes old files
index            the digests of blocks with files, as the engine's thread knows them; queues copies of blocks to the disk
watch            keeps the index up to date with the folder
"""
