"""What commands that ask share: options of answers, files of many questions, and how far a context has come"""
