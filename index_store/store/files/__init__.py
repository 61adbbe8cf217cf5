"""What a store needs of the file system: durable writes, locks that die with their process, reads that cannot hang"""
