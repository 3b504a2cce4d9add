"""stub"""
def join(*a): raise NotImplementedError
