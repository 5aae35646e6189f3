def check_once(device):
    return None
